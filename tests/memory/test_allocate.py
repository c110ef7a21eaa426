"""Memory that stays: zeros in a mapping of its own, given back to the system when the tensor is dropped."""

import gc
import mmap
import weakref

import pytest
import torch

from partita.memory import allocate as module
from partita.memory.allocate import allocate

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64])
@pytest.mark.parametrize("num_elements", [0, 1, 1000, 100_000])
def test_zeros(num_elements: int, dtype: torch.dtype) -> None:
    tensor = allocate(num_elements, dtype, CPU)
    assert (tensor.shape, tensor.dtype) == ((num_elements,), dtype)
    assert not tensor.any()
    tensor.fill_(3)
    assert bool((tensor == 3).all())
    assert tensor.untyped_storage().nbytes() == num_elements * dtype.itemsize
    assert num_elements == 0 or tensor.data_ptr() % mmap.PAGESIZE == 0


def test_two_do_not_share() -> None:
    first, second = allocate(10, torch.float32, CPU), allocate(10, torch.float32, CPU)
    first.fill_(1.0)
    assert second.tolist() == [0.0] * 10


def test_dropped_memory_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        """One that can be watched."""

    made: list[weakref.ref[Mapping]] = []

    def watched(*args: int, **kwargs: int) -> Mapping:
        mapping = Mapping(*args, **kwargs)
        made.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(module.mmap, "mmap", watched)
    tensor = allocate(1000, torch.float32, CPU)
    view = tensor[10:20]
    del tensor
    gc.collect()
    assert made[0]() is not None, "a view keeps it"
    del view
    gc.collect()
    assert made[0]() is None
