"""Pinned memory between numpy and the device: a ring of buffers, reused when their copies are done.

The host fills a piece and enqueues its copy; an event tells when the buffer may be filled again.
It knows addresses and streams, no tensors.
"""

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import ExecutorError
from edgevlm.executors.cuda import Event, Stream, host_view
from edgevlm.memory_plan import ALIGNMENT, aligned

BUFFERS = 2
PAGE = 4096  # what O_DIRECT asks of addresses and lengths
SMALLEST = 1 << 14


class Staging:
    """A ring over pinned memory at `address`."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.piece = nbytes // BUFFERS // PAGE * PAGE
        if self.piece < SMALLEST:
            raise ExecutorError(
                f"staging has {nbytes:,} bytes and needs {BUFFERS * SMALLEST:,}; "
                "build the bundle again"
            )
        whole = host_view(address, nbytes)
        self._buffers = [whole[i * self.piece : (i + 1) * self.piece] for i in range(BUFFERS)]
        self._events: list[dict[int, Event]] = [{} for _ in range(BUFFERS)]
        self._streams: list[Stream] = []
        self._busy: set[int] = set()  # streams that read from or write to the current buffer
        self._current = 0
        self._used = 0

    def connect(self, stream: Stream) -> None:
        """Make the events for a stream; all of them exist before the first copy."""
        self._streams.append(stream)
        for events in self._events:
            events[stream.handle] = Event()

    def reserve(self, nbytes: int) -> NDArray[np.uint8]:
        """A piece to fill, at most `piece` bytes; valid until two more buffers were filled."""
        assert nbytes <= self.piece, "larger than a buffer"
        if self._used + nbytes > self.piece:
            self._next()
        start = self._used
        self._used += aligned(nbytes)
        return self._buffers[self._current][start : start + nbytes]

    def holds(self, host: int) -> bool:
        """Whether an address lies in the current buffer."""
        start = self._buffers[self._current].ctypes.data
        return start <= host < start + self.piece

    def send(self, stream: Stream, address: int, piece: NDArray[np.uint8]) -> None:
        """Enqueue the copy of a reserved piece to the device."""
        self._busy.add(stream.handle)
        stream.to_device(address, piece.ctypes.data, piece.nbytes)

    def write(self, stream: Stream, address: int, data: NDArray[np.uint8]) -> None:
        """Enqueue the copy of any bytes; they may change as soon as this returns."""
        for start in range(0, data.nbytes, self.piece):
            part = data[start : start + self.piece]
            piece = self.reserve(part.nbytes)
            piece[...] = part
            self.send(stream, address + start, piece)

    def read(self, stream: Stream, address: int, out: NDArray[np.uint8]) -> None:
        """Copy from the device into any array; waits."""
        for start in range(0, out.nbytes, self.piece):
            part = out[start : start + self.piece]
            piece = self.reserve(part.nbytes)
            self._busy.add(stream.handle)
            stream.to_host(piece.ctypes.data, address + start, piece.nbytes)
            stream.synchronize()
            part[...] = piece

    def close(self) -> None:
        """Give the events back."""
        for events in self._events:
            for event in events.values():
                event.close()
            events.clear()

    def _next(self) -> None:
        """Go on to the next buffer once the copies out of it are done."""
        events = self._events[self._current]
        for stream in self._streams:
            if stream.handle in self._busy:
                events[stream.handle].record(stream)
        self._busy.clear()
        self._current = (self._current + 1) % BUFFERS
        self._used = 0
        for event in self._events[self._current].values():
            event.synchronize()


def split_staging(nbytes: int, mirror: int) -> tuple[int, int]:
    """(bytes of the ring, bytes kept for what is read after each step), both aligned."""
    mirror = aligned(mirror)
    if nbytes - mirror < BUFFERS * max(SMALLEST, ALIGNMENT):
        return nbytes, 0  # results then come through the ring, piece by piece
    return nbytes - mirror, mirror
