"""The interface of the disk tier's scratch file, and one for runs without a disk."""

from typing import Protocol

from torch import Tensor

from partita.config.schema import Offload
from partita.memory.disk import DiskReport, Region, in_pages, open_disk
from partita.memory.streams import Event


class Scratch(Protocol):
    """The interface of :class:`~partita.memory.disk.Disk`."""

    def report(self) -> DiskReport: ...
    def provide(self, num_bytes: int) -> None: ...
    def reserve(self, num_bytes: int) -> Region: ...
    def release(self, region: Region) -> None: ...
    def read(self, region: Region, into: Tensor) -> Event: ...
    def write(self, region: Region, values: Tensor) -> Event: ...
    def close(self) -> None: ...


class SimulatedDisk:
    """A scratch file without a disk: counts the bytes that would be read and written."""

    def __init__(self) -> None:
        self._read_bytes = self._written_bytes = self._end = 0

    def report(self) -> DiskReport:
        return DiskReport(self._read_bytes, self._written_bytes)

    def provide(self, num_bytes: int) -> None:
        """Do nothing: space is unlimited."""

    def reserve(self, num_bytes: int) -> Region:
        region = Region(self._end, in_pages(num_bytes))
        self._end += region.num_bytes
        return region

    def release(self, region: Region) -> None:
        """Do nothing: regions are not reused."""

    def read(self, region: Region, into: Tensor) -> Event:
        self._read_bytes += into.nbytes
        return Event()

    def write(self, region: Region, values: Tensor) -> Event:
        self._written_bytes += values.nbytes
        return Event()

    def close(self) -> None:
        pass


def open_scratch(offload: Offload, rank: int, *, simulated: bool) -> Scratch:
    """Open the disk tier of a rank."""
    return SimulatedDisk() if simulated else open_disk(offload, rank)
