"""Builds the driver that stands in for CUDA, and steers it.

It is loaded once a process, before the bindings look for a driver; from then on this process has
no other.
"""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-strict-prototypes")
DEVICE, PINNED = 0, 1
H2D, D2H, D2D = 0, 1, 2
UNKNOWN = 999  # CUDA_ERROR_UNKNOWN
OUT_OF_MEMORY = 2
BUDGET = 8 << 30

HostFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def build(directory: Path) -> Path:
    """Compile libcuda.so.1."""
    library = directory / "libcuda.so.1"
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    flags = ["-std=gnu11", "-shared", "-fPIC", "-O1", "-fvisibility=hidden", *WARNINGS]
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run(["gcc", *flags, soname, "-o", str(library), *sources, "-lpthread"], check=True)
    return library


class Stub:
    """The loaded driver's control functions."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        for name in ("used", "peak", "copied", "launches", "unpinned"):
            getattr(self.lib, f"stub_{name}").restype = ctypes.c_uint64
        for name in ("calls", "live", "handles", "overruns"):
            getattr(self.lib, f"stub_{name}").restype = ctypes.c_long
        self.lib.stub_traced.restype = ctypes.c_char_p
        self.lib.stub_budget.argtypes = [ctypes.c_size_t]
        self.lib.stub_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
        self.lib.stub_enqueue.argtypes = [ctypes.c_void_p, HostFunction, ctypes.c_void_p]

    def reset(self) -> None:
        """As it was when it was loaded, but for the counters."""
        self.fail("", 0)
        self.lib.stub_trace(0)
        self.lib.stub_integrated(1)
        self.lib.stub_discard(0)
        self.lib.stub_version(13000)
        self.lib.stub_budget(BUDGET)
        self.lib.stub_reset_peak()

    def fail(self, prefix: str, count: int, code: int = UNKNOWN) -> None:
        """Let the `count`-th call from now, of those that begin with `prefix`, return `code`."""
        self.lib.stub_fail(prefix.encode(), count, code)

    def budget(self, nbytes: int) -> None:
        """How much device and pinned memory there is."""
        self.lib.stub_budget(nbytes)

    @property
    def calls(self) -> int:
        """Calls of the driver so far."""
        return int(self.lib.stub_calls())

    @property
    def used(self) -> int:
        """Bytes taken now, device and pinned."""
        return int(self.lib.stub_used())

    @property
    def peak(self) -> int:
        """The most that was taken since the reset."""
        return int(self.lib.stub_peak())

    def copied(self, direction: int) -> int:
        """Bytes that copies really moved."""
        return int(self.lib.stub_copied(direction))

    def leaks(self) -> dict[str, int]:
        """What was not given back; empty where all was."""
        found = {
            "device": int(self.lib.stub_live(DEVICE)),
            "pinned": int(self.lib.stub_live(PINNED)),
            "handles": int(self.lib.stub_handles()),
            "overruns": int(self.lib.stub_overruns()),
        }
        return {name: count for name, count in found.items() if count}

    def trace(self) -> "Trace":
        """Record the calls of a `with` block."""
        return Trace(self.lib)


class Trace:
    """Calls of the driver, one a line."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self.lines: list[str] = []

    def __enter__(self) -> "Trace":
        self._lib.stub_trace(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.lines = self._lib.stub_traced().decode().splitlines()
        self._lib.stub_trace(0)

    def names(self) -> list[str]:
        """The functions called."""
        return [line.partition(" ")[0] for line in self.lines]
