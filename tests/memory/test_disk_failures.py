"""Failures of a disk: a folder that refuses, no space, a failed request, a killed process."""

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from partita.config.schema import Offload
from partita.errors import PartitaError
from partita.memory.disk import ALIGNMENT, Disk, open_disk
from tests.memory.scratch import BLOCK_BYTES, read, refuse, some


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "may write"),
        (errno.EROFS, "read-only"),
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "quota"),
        (errno.EMFILE, "on another disk"),
    ],
)
def test_a_folder_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str) -> None:
    def refused(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(PartitaError, match=remedy) as caught:
        Disk(tmp_path, "rank0")
    assert f"'{tmp_path}'" in str(caught.value)
    assert os.strerror(number) in str(caught.value)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, remedy in (
        (tmp_path / "missing", "create the folder"),
        (tmp_path / "file", "zero.offload.path to a folder"),
        (tmp_path / "file" / "below", "zero.offload.path to a folder"),
    ):
        with pytest.raises(PartitaError, match=remedy) as caught:
            Disk(path, "rank0")
        assert f"'{path}'" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("mode", ["buffered", "buffered after a request"])
def test_no_direct_requests_are_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    refuse(monkeypatch, mode)
    with pytest.warns(UserWarning, match="O_DIRECT.*page cache.*slower.*zero.offload.path") as caught:
        disk = Disk(tmp_path, "rank0")
    assert f"'{tmp_path}'" in str(caught[0].message)
    for _ in range(3):
        disk.write(disk.reserve(5000), some(5000)).wait()
    assert len(caught) == 1
    disk.close()


def test_a_name_left_by_a_killed_process_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank0").write_text("of a run that was killed")
    refuse(monkeypatch, "named")
    disk = Disk(tmp_path, "rank0")
    assert list(tmp_path.iterdir()) == []
    disk.close()


def test_a_full_disk_is_found_when_space_is_reserved(plain: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, values = plain.reserve(50_000), some(50_000)
    plain.write(kept, values).wait()
    posix_fallocate, files = os.posix_fallocate, list[int]()

    def full(file: int, offset: int, num_bytes: int) -> None:
        files.append(file)
        posix_fallocate(file, offset, num_bytes // 2 // ALIGNMENT * ALIGNMENT)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PartitaError, match=r"bytes are free\): reserving 81920 bytes failed: No space.*free space"):
        plain.reserve(80_000)
    assert os.fstat(files[0]).st_size == kept.num_bytes, "what was taken is given back"
    monkeypatch.undo()
    later, more = plain.reserve(80_000), some(80_000)
    assert later.offset == kept.num_bytes
    plain.write(later, more).wait()
    assert torch.equal(read(plain, kept, values), values)
    assert torch.equal(read(plain, later, more), more)


def test_a_file_that_may_not_grow(plain: Disk) -> None:
    plain.reserve(10_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(PartitaError, match="reserving 2097152 bytes failed: File too large.*ulimit -f"):
            plain.reserve(2**21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    plain.reserve(2**21)


@pytest.mark.filterwarnings("ignore:.*O_DIRECT")
def test_a_disk_that_is_full_indeed(small_filesystem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(small_filesystem, "rank0")
    kept, values = disk.reserve(3 * 2**20), some(3 * 2**20)
    disk.write(kept, values).wait()
    with pytest.raises(PartitaError, match="reserving 6291456 bytes failed: No space left.*free space"):
        disk.reserve(6 * 2**20)
    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with pytest.warns(UserWarning, match="cannot reserve space"):
        late = disk.reserve(6 * 2**20)
    with pytest.raises(PartitaError, match="writing .* bytes at offset .* failed: No space left.*free space"):
        disk.write(late, some(6 * 2**20)).wait()
    assert torch.equal(read(disk, kept, values), values)
    disk.close()
    assert os.statvfs(small_filesystem).f_bfree * os.statvfs(small_filesystem).f_bsize > 7 * 2**20, "it is given back"


def unsupported(*_: object) -> None:
    raise OSError(errno.EOPNOTSUPP, "no fallocate")


def test_space_that_cannot_be_reserved_is_one_warning(plain: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with pytest.warns(UserWarning, match="cannot reserve space.*zero.offload.path") as caught:
        regions = [plain.reserve(size) for size in (5000, 100, 20_000)]
    assert len(caught) == 1
    for region in regions:
        values = some(region.num_bytes)
        plain.write(region, values).wait()
        assert torch.equal(read(plain, region, values), values)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_request_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    disk, size = Disk(tmp_path, "rank0"), 4 * BLOCK_BYTES
    good, bad, also_good = regions = [disk.reserve(size) for _ in range(3)]
    values = [some(size) for _ in regions]
    for region, tensor in zip(regions, values, strict=True):
        disk.write(region, tensor).wait()
    place = bad.offset + random.randrange(4) * BLOCK_BYTES
    real = getattr(os, call)

    def fails(file: int, views: Sequence[memoryview], offset: int) -> int:
        if offset == place:
            raise OSError(number, os.strerror(number))
        return int(real(file, views, offset))

    monkeypatch.setattr(os, call, fails)
    values = [some(size) for _ in regions]
    writes = {region: disk.write(region, tensor) for region, tensor in zip(regions, values, strict=True)}
    reads = [disk.read(region, some(size)) for region in regions]
    verb = {"pwritev": "writing", "preadv": "reading"}[call]
    message = (
        rf"'{tmp_path}' \(\d+ bytes are free\): {verb} {BLOCK_BYTES} bytes at offset {place} failed: "
        rf"{os.strerror(number)}; .*(free space|dmesg)"
    )
    if call == "pwritev":
        with pytest.raises(PartitaError, match=message):
            writes[bad].wait()
    for event in (reads[1], reads[1], disk.read(bad, some(size)), disk.write(bad, some(size))):
        with pytest.raises(PartitaError, match=message):
            event.wait()
    for region, tensor in ((good, values[0]), (also_good, values[2])):
        writes[region].wait()
        assert torch.equal(read(disk, region, tensor), tensor)
    monkeypatch.setattr(os, call, real)
    with pytest.raises(PartitaError, match=message):
        disk.read(bad, some(size)).wait()
    disk.release(bad)
    assert disk.reserve(size) == bad
    disk.write(bad, values[0]).wait()
    assert torch.equal(read(disk, bad, values[0]), values[0])
    disk.close()


def test_a_file_that_ends_early(plain: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    region = plain.reserve(5000)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(PartitaError, match="reading 8192 bytes at offset 0 failed: the file ends"):
        plain.read(region, some(5000)).wait()


def test_close_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, "rank0")
    region = disk.reserve(5000)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", fails)
    events = [disk.write(region, some(5000)) for _ in range(3)]
    disk.close()
    for event in events:
        with pytest.raises(PartitaError, match="dmesg"):
            event.wait()


WRITES_ON = """
import errno, os, sys
from pathlib import Path
import torch
from partita.memory.allocate import allocate
from partita.memory.disk import Disk

open_file = os.open
def without_unnamed_files(path, flags, *rest):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
    return open_file(path, flags, *rest)

if sys.argv[2] == "named":
    os.open = without_unnamed_files
disk = Disk(Path(sys.argv[1]), "rank0")
region = disk.reserve(2**24)
values = allocate(2**24, torch.uint8, torch.device("cpu"))
disk.write(region, values).wait()
print("writing", flush=True)
while True:
    disk.write(region, values)
    disk.read(region, values).wait()
"""


@pytest.mark.parametrize("mode", ["direct", "named"])
def test_a_killed_process_leaves_nothing(tmp_path: Path, mode: str) -> None:
    command = [sys.executable, "-c", WRITES_ON, str(tmp_path), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["/dev/shm", None])
def test_a_folder_in_memory_is_one_warning(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/dev/shm")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rank in range(3):
            open_disk(Offload(path=name), rank).close()
    said = [str(warning.message) for warning in caught if "O_DIRECT" not in str(warning.message)]
    assert len(said) == 1
    for part in ("'/dev/shm'", "tmpfs", "in memory", "zero.offload.path"):
        assert part in said[0]
