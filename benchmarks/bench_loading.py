"""What loading a file costs in memory and page cache, on the stand-in for the CUDA driver.

    python benchmarks/bench_loading.py [--gib 2] [--directory DIR]

Makes a file, loads it three ways, and prints resident memory (growth of the peak), pages of the
file that stay cached (mincore) and the rate. `naive` reads the file whole, as a comparison. Device
memory is left untouched by copies: on a board it is not this process's resident memory.
"""

import argparse
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from edgevlm.executors.cuda import Device, Stream
from edgevlm.executors.loading import EngineReader, load_to_device
from edgevlm.executors.staging import Staging
from tests.cuda_stub import Stub, build

MIB = 1 << 20
RING = 8 * MIB


def main() -> None:
    """Entry of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--directory", type=Path, default=Path("."))
    options = parser.parse_args()
    nbytes = int(options.gib * (1 << 30)) // MIB * MIB
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        stub = Stub(build(Path(directory)))
        stub.reset()
        stub.lib.stub_discard(1)
        path = Path(directory) / "weights"
        _make(path, nbytes)
        device = Device()
        stream = Stream(device, "compute")
        pinned = device.allocate_host(RING)
        staging = Staging(pinned, RING)
        staging.connect(stream)
        address = device.allocate(nbytes)

        def load(direct: bool) -> None:
            load_to_device(path, address, nbytes, staging, stream, direct=direct)

        def read() -> None:
            reader = EngineReader(path, nbytes, staging)
            while reader.read(nbytes):
                pass
            reader.close()

        print(f"{nbytes / MIB:,.0f} MiB, ring of {RING // MIB} MiB")
        for name, work in (
            ("direct", lambda: load(True)),
            ("buffered", lambda: load(False)),
            ("engine reader", read),
            ("naive", lambda: len(path.read_bytes())),
        ):
            _measure(name, path, nbytes, work)
        device.free(address)
        staging.close()
        device.free_host(pinned)
        stream.close()
        device.close()


def _make(path: Path, nbytes: int) -> None:
    block = os.urandom(16 * MIB)
    with path.open("wb") as file:
        for start in range(0, nbytes, len(block)):
            file.write(block[: nbytes - start])
        os.fsync(file.fileno())


def _measure(name: str, path: Path, nbytes: int, work: Callable[[], object]) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cached = _meminfo("Cached")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    growth = _status("VmHWM") - before
    print(
        f"{name:14} {nbytes / MIB / seconds:7,.0f} MiB/s  resident +{growth / MIB:8,.1f} MiB  "
        f"file in page cache {_in_cache(path) / MIB:8,.1f} MiB  "
        f"Cached {(_meminfo('Cached') - cached) / MIB:+9,.1f} MiB"
    )


def _status(key: str) -> int:
    return _kib(Path("/proc/self/status"), key)


def _meminfo(key: str) -> int:
    return _kib(Path("/proc/meminfo"), key)


def _kib(path: Path, key: str) -> int:
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _in_cache(path: Path) -> int:
    size = path.stat().st_size
    found = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
        first = ctypes.c_char.from_buffer(view)
        address = ctypes.c_void_p(ctypes.addressof(first))
        ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), found)
        del first
    return sum(byte & 1 for byte in found) * mmap.PAGESIZE


if __name__ == "__main__":
    main()
