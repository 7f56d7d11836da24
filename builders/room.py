"""What compiling a stage takes, and how large a stage may be where memory is short.

Arithmetic on figures that a compiler on a desktop gave; nothing here was measured on a board.
"""

from edgevlm.device import Machine, usable_bytes
from edgevlm.errors import BuildError

# Bounds seven networks that tensorrt-rtx 1.7.1 compiled: 249 MB took 0.9 GB, 3,646 MB 13.9 GB.
COMPILER_BASE_BYTES = 1_100_000_000
COMPILER_FACTOR = 3.6
STAGE_BYTES = 1 << 30  # L4T 36.4.7 fails larger allocations
MIN_STAGE_BYTES = 64 << 20  # smaller ones would be mostly border


def compile_peak(stage_bytes: int) -> int:
    """The most memory that compiling a stage with so many bytes of weights may take."""
    return COMPILER_BASE_BYTES + int(COMPILER_FACTOR * stage_bytes)


def stage_limit(usable: int | None) -> int:
    """The largest stage that so much memory can compile; at most 1 GiB, the least of any use."""
    if usable is None:
        return STAGE_BYTES
    fits = int((usable - COMPILER_BASE_BYTES) / COMPILER_FACTOR)
    return max(MIN_STAGE_BYTES, min(STAGE_BYTES, fits))


def require_room(stage_bytes: int, machine: Machine) -> None:
    """Raise BuildError, with both numbers, where compiling would most likely run out of memory."""
    usable, needed = usable_bytes(machine), compile_peak(stage_bytes)
    if usable is not None and needed > usable:
        raise BuildError(
            f"compiling the largest stage ({stage_bytes:,} bytes of weights) may take {needed:,} "
            f"bytes and {usable:,} can be had; close other programs, stop the desktop, or go on "
            "all the same with --force"
        )
