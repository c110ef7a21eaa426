"""Allocation of zeros in a separate mapping, which returns to the system when the tensor is freed."""

import ctypes
import gc
import mmap
import weakref

import pytest
import torch

from partita.errors import PartitaError
from partita.memory.allocate import Mapping, allocate, allocate_host

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Runtime:
    """A stand-in for CUDA's runtime that records registered memory."""

    def __init__(self, status: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self._status = status

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if not self._status:
            self.registered[address] = num_bytes
        return self._status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        ctypes.string_at(address, self.registered.pop(address))  # the process crashes here if it is unmapped
        return 0

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return f"status {status}"


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


def test_dropped_memory_is_unmapped(mappings: list["weakref.ref[Mapping]"]) -> None:
    tensor = allocate(1000, torch.float32, CPU)
    (mapping,) = mappings
    view = tensor[10:20]
    del tensor
    gc.collect()
    assert mapping() is not None, "a view keeps it"
    del view
    gc.collect()
    assert mapping() is None


@pytest.mark.parametrize("refused", [False, True])
def test_huge_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    asked: list[int] = []

    def madvise(_: Mapping, option: int) -> None:
        asked.append(option)
        if refused:
            raise OSError(22, "a kernel without them")

    monkeypatch.setattr(Mapping, "madvise", madvise)
    assert not allocate(1000, torch.float32, CPU).any()
    assert asked == [mmap.MADV_HUGEPAGE]


def test_host_memory_is_registered_for_as_long_as_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    tensor = allocate_host(1000, torch.bfloat16, CUDA)
    assert runtime.registered == {tensor.data_ptr(): 2000}
    assert (tensor.device, tensor.shape, tensor.dtype) == (CPU, (1000,), torch.bfloat16)
    assert tensor.data_ptr() % mmap.PAGESIZE == 0
    assert not tensor.any()
    tensor.fill_(3)
    view = tensor[10:20]
    del tensor
    gc.collect()
    assert len(runtime.registered) == 1, "a view keeps it"
    del view
    gc.collect()
    assert runtime.registered == {}


@pytest.mark.parametrize(("num_elements", "device"), [(1000, CPU), (0, CUDA)])
def test_nothing_to_register(monkeypatch: pytest.MonkeyPatch, num_elements: int, device: torch.device) -> None:
    monkeypatch.delattr(torch.cuda, "cudart")
    assert allocate_host(num_elements, torch.float32, device).tolist() == [0.0] * num_elements


def test_memory_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(status=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(PartitaError, match=r"cannot pin 4000 bytes of host memory \(status 2\).*ulimit -l.*less"):
        allocate_host(1000, torch.float32, CUDA)
    gc.collect()
    assert runtime.registered == {}
