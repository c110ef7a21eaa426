"""Training on 32 ranks (tensor 4 x pipeline 4 x data 2) matches one process."""

import pytest

from tests.parallel import test_meshes


@pytest.mark.thorough
def test_thirty_two_ranks() -> None:
    test_meshes.check("llama-4", {"tensor": 4, "pipeline": 4}, [{"stage": 3}], num_steps=3, num_data=2)
