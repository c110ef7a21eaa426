"""Comparison of the Triton kernels, in Triton's interpreter, with the reference. `test_triton.py` runs this script."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from partita.kernels import native, reference, update
from partita.kernels.triton import update as kernels
from tests.kernels.states import ADAM, FORMS, GRADS, RULES, Rule, State, assert_same_bits, make, random_grad, step

FACTOR = 0.37
LATE = replace(ADAM, step=2**24 + 5)  # its random numbers wrap around


def by(module: Any, state: State, rule: Rule, grads: Sequence[Tensor]) -> State:
    """Return the state after one step per gradient by the kernels of ``module``."""
    with (
        mock.patch.object(native, "module", return_value=None),
        mock.patch.object(update, "_fallback_module", return_value=module),
    ):
        for grad in grads:
            assert step(state, grad, rule, FACTOR)
    return state


def compare(start: State, rule: Rule, grads: Sequence[Tensor]) -> None:
    assert_same_bits(by(kernels, start.clone(), rule, grads), by(reference, start.clone(), rule, grads))


def main(seed: int) -> None:
    torch.manual_seed(seed)
    rules = [(rule, False) for rule in RULES] + [(rule, True) for rule in (ADAM, LATE, replace(ADAM, decoupled=False))]
    for (rule, coded), form in product(rules, FORMS):
        num = int(torch.randint(1, 1200, ()))
        grads = [random_grad(num, dtype) for dtype in GRADS]
        grads[0][:2] = 1e-42  # below the smallest normal number
        compare(make(num, form, coded=coded), rule, grads)
    tiny = make(300, "fp32").map(lambda tensor, _: tensor.fill_(1.3e-38))
    compare(tiny, ADAM, [torch.zeros(300)] * 3)
    for rule, bad in product(RULES, (float("inf"), float("nan"))):
        grad = random_grad(300, torch.float32)
        grad[299] = bad
        with (
            mock.patch.object(native, "module", return_value=None),
            mock.patch.object(update, "_fallback_module", return_value=kernels),
        ):
            assert not step(make(300, "split"), grad, rule), f"{rule}: {bad} is not reported"


if __name__ == "__main__":
    main(int(sys.argv[1]))
