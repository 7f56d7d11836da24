"""Files go to the device through a small pinned ring: content, errors, memory and page cache."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgevlm.errors import BundleError
from tests.cuda_stub import Stub

pytestmark = pytest.mark.usefixtures("stub")
MIB = 1 << 20
RING = 2 * MIB


class Rig:
    """A device, a stream, a ring of two pieces, and room on the device."""

    def __init__(self, room: int) -> None:
        from edgevlm.executors.cuda import Device, Stream
        from edgevlm.executors.staging import Staging

        self.device = Device()
        self.stream = Stream(self.device, "compute")
        self.pinned = self.device.allocate_host(RING)
        self.staging = Staging(self.pinned, RING)
        self.staging.connect(self.stream)
        self.address = self.device.allocate(room)

    def bytes_at(self, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        self.staging.read(self.stream, self.address, out)
        return out

    def close(self) -> None:
        self.device.free(self.address)
        self.staging.close()
        self.device.free_host(self.pinned)
        self.stream.close()
        self.device.close()


@pytest.fixture
def rig(stub: Stub) -> Iterator[Rig]:
    rig = Rig(8 * MIB)
    yield rig
    rig.close()


def make_file(path: Path, nbytes: int) -> np.ndarray:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    path.write_bytes(data.tobytes())
    return data


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache, by mincore."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        found = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(view)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert libc.mincore(address, ctypes.c_size_t(size), found) == 0
        del start
    return sum(byte & 1 for byte in found) * mmap.PAGESIZE


def drop_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("nbytes", [1, 4096, MIB, 3 * MIB + 4097], ids=str)
def test_every_byte_arrives(rig: Rig, tmp_path: Path, nbytes: int, direct: bool) -> None:
    from edgevlm.executors.loading import load_to_device

    data = make_file(tmp_path / "weights", nbytes)
    seen: list[tuple[int, int]] = []
    path = tmp_path / "weights"
    args = (path, rig.address, nbytes, rig.staging, rig.stream)
    load_to_device(*args, lambda done, total: seen.append((done, total)), direct=direct)
    assert (rig.bytes_at(nbytes) == data).all()
    assert seen[-1] == (nbytes, nbytes) and seen == sorted(seen)
    assert rig.device.copied.h2d == nbytes


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_memory_stays_small_and_the_page_cache_empty(
    stub: Stub, tmp_path: Path, direct: bool
) -> None:
    from edgevlm.executors.loading import load_to_device

    path, nbytes = tmp_path / "weights", 96 * MIB
    with path.open("wb") as file:
        for _ in range(96):
            file.write(os.urandom(MIB))
    drop_cache(path)
    rig = Rig(nbytes)
    stub.lib.stub_discard(1)  # what is on a device is not in this process
    before = resident_bytes()
    peaks: list[int] = []
    args = (path, rig.address, nbytes, rig.staging, rig.stream)
    load_to_device(*args, lambda *_: peaks.append(resident_bytes()), direct=direct)
    assert max(peaks) - before <= RING + 8 * MIB
    assert cached_bytes(path) <= MIB
    rig.close()


def test_a_file_of_another_length_is_refused(rig: Rig, tmp_path: Path) -> None:
    from edgevlm.executors.loading import load_to_device

    make_file(tmp_path / "weights", 5000)
    with pytest.raises(BundleError, match=r"ends at byte 5,000 and should have 6,000"):
        load_to_device(tmp_path / "weights", rig.address, 6000, rig.staging, rig.stream)
    with pytest.raises(BundleError, match="cannot be opened: No such file"):
        load_to_device(tmp_path / "none", rig.address, 6000, rig.staging, rig.stream)
    with pytest.raises(BundleError, match="Is a directory|should have"):
        load_to_device(tmp_path, rig.address, 6000, rig.staging, rig.stream)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_a_file_that_shrinks_while_it_is_read(rig: Rig, tmp_path: Path, direct: bool) -> None:
    from edgevlm.executors.loading import load_to_device

    path = tmp_path / "weights"
    make_file(path, 3 * MIB)
    cut = lambda done, total: os.truncate(path, MIB + 4096)  # noqa: E731
    with pytest.raises(BundleError, match=r"ends at byte 1,052,672 and should have 3,145,728"):
        load_to_device(path, rig.address, 3 * MIB, rig.staging, rig.stream, cut, direct=direct)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_short_and_interrupted_reads(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    from edgevlm.executors import loading

    data = make_file(tmp_path / "weights", 2 * MIB + 100)
    real, calls = os.preadv, 0

    def preadv(fd: int, buffers: list[Any], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise InterruptedError
        size = len(buffers[0]) if calls % 2 else (1000, 5000, 300_000)[calls % 5 % 3]
        if direct and size % 4096:
            got = real(fd, [buffers[0][: -(-size // 4096) * 4096]], offset)
            return min(got, size)
        return real(fd, [buffers[0][:size]], offset)

    monkeypatch.setattr(loading.os, "preadv", preadv)
    args = (tmp_path / "weights", rig.address, data.nbytes, rig.staging, rig.stream)
    loading.load_to_device(*args, direct=direct)
    assert (rig.bytes_at(data.nbytes) == data).all() and calls > 3


def test_a_filesystem_without_direct_reads(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgevlm.executors import loading

    data = make_file(tmp_path / "weights", 5000)
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(loading.os, "open", refuse)
    loading.load_to_device(tmp_path / "weights", rig.address, 5000, rig.staging, rig.stream)
    assert (rig.bytes_at(5000) == data).all()


def test_a_bad_disk_names_the_place(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgevlm.executors import loading

    make_file(tmp_path / "weights", 5000)

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(loading.os, "preadv", broken)
    with pytest.raises(BundleError, match="cannot be read at byte 0: Input/output error"):
        loading.load_to_device(tmp_path / "weights", rig.address, 5000, rig.staging, rig.stream)


def test_a_reader_reads_and_seeks(rig: Rig, tmp_path: Path) -> None:
    from edgevlm.executors.loading import EngineReader

    data = make_file(tmp_path / "engine", 3 * MIB + 17).tobytes()
    seen: list[int] = []
    reader = EngineReader(
        tmp_path / "engine", len(data), rig.staging, lambda done, total: seen.append(done)
    )
    out = b""
    while piece := bytes(reader.read(len(data))):
        assert len(piece) <= rig.staging.piece
        out += piece
    assert out == data and seen[-1] == len(data)
    for offset, whence, place in ((5, 0, 5), (-17, 2, len(data) - 17), (-100, 1, len(data) - 117)):
        assert reader.seek(offset, whence)
        assert bytes(reader.read(8)) == data[place : place + 8]
        assert reader.seek(place, 0)
    assert not reader.seek(-1, 0) and not reader.seek(1, 2)
    reader.close()
    reader.close()


def test_a_reader_of_the_old_kind_gives_whole_pieces(rig: Rig, tmp_path: Path) -> None:
    from edgevlm.executors.loading import EngineReader

    data = make_file(tmp_path / "engine", 5 * MIB + 3).tobytes()
    drop_cache(tmp_path / "engine")
    reader = EngineReader(tmp_path / "engine", len(data), rig.staging)
    sizes = (24, 1000, MIB - 4096, 2 * MIB + 7, 100, 10 * MIB)
    out = [bytes(reader.read_all(size)) for size in sizes]
    assert b"".join(out) == data and [len(o) for o in out[:5]] == list(sizes[:5])
    assert bytes(reader.read_all(5)) == b""
    reader.close()
    assert cached_bytes(tmp_path / "engine") <= MIB
