"""Files into device memory, never whole in host memory and past the page cache.

On a board the page cache and the GPU share one memory: a file read the ordinary way is there twice
just when there is least room. So: O_DIRECT where the filesystem has it, else the pages are dropped
as soon as they are read.
"""

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import BundleError, EdgeVLMError
from edgevlm.executors.cuda import Stream
from edgevlm.executors.staging import PAGE, Staging

Progress = Callable[[int, int], None]  # bytes done, of how many


class DirectFile:
    """One file, read in pieces at offsets that are multiples of a page.

    `expected` None: as long as it is. Raises BundleError where the file is not that long.
    """

    def __init__(self, path: Path, expected: int | None = None, *, direct: bool = True) -> None:
        self.path = path
        flag = getattr(os, "O_DIRECT", 0) if direct else 0
        self.direct = bool(flag)
        try:
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: the filesystem has no O_DIRECT
                    raise
                self.direct = False
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BundleError(f"{path} cannot be opened: {error.strerror}") from error
        self.size = os.fstat(self._fd).st_size
        if expected is not None and self.size != expected:
            self.close()
            raise self._truncated(self.size, expected)

    def read(self, buffer: NDArray[np.uint8], offset: int) -> int:
        """Fill the buffer from `offset` on, or as far as the file goes; how many bytes.

        The buffer is page-aligned and a multiple of a page long. Raises BundleError.
        """
        wanted = min(buffer.nbytes, self.size - offset)
        done = 0
        while done < wanted:
            try:
                count = os.preadv(self._fd, [buffer.data[done:]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct:
                    self._without_direct()
                    continue
                raise BundleError(
                    f"{self.path} cannot be read at byte {offset + done:,}: {error.strerror}"
                ) from error
            if count == 0:
                raise self._truncated(offset + done, self.size)
            if not self.direct:
                os.posix_fadvise(self._fd, offset + done, count, os.POSIX_FADV_DONTNEED)
            done += count
            if self.direct and done < wanted and done % PAGE:
                done -= done % PAGE  # a short read: go on from where a page begins
                if count < PAGE:
                    self._without_direct()
        return wanted

    def map(self, offset: int, nbytes: int) -> mmap.mmap:
        """A window of the file, whose pages the kernel can take back; for a reader of V1."""
        self._without_direct()
        window = mmap.mmap(self._fd, nbytes, access=mmap.ACCESS_READ, offset=offset)
        window.madvise(mmap.MADV_SEQUENTIAL)
        return window

    def close(self) -> None:
        """Close, leaving nothing of it in the page cache; safe to call twice."""
        if self._fd >= 0:
            if not self.direct:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self._fd)
            self._fd = -1

    def _without_direct(self) -> None:
        if self.direct:
            os.close(self._fd)
            self.direct = False
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def _truncated(self, found: int, expected: int) -> BundleError:
        return BundleError(
            f"{self.path} ends at byte {found:,} and should have {expected:,}; "
            "copy or build the bundle again"
        )


def load_to_device(
    path: Path,
    address: int,
    nbytes: int,
    staging: Staging,
    stream: Stream,
    progress: Progress | None = None,
    *,
    direct: bool = True,
) -> None:
    """Copy a file of `nbytes` to device memory; done when this returns. Raises BundleError."""
    file = DirectFile(path, nbytes, direct=direct)
    try:
        for offset in range(0, nbytes, staging.piece):
            piece = staging.reserve(staging.piece)
            count = file.read(piece, offset)
            staging.send(stream, address + offset, piece[:count])
            if progress is not None:
                progress(offset + count, nbytes)
        stream.synchronize()
    finally:
        file.close()


class EngineReader:
    """A file as a stream for TensorRT, one pinned piece in memory at a time.

    What `read` gives is valid until the next call: the bindings copy it before they come back.
    """

    def __init__(
        self, path: Path, expected: int, staging: Staging, progress: Progress | None = None
    ) -> None:
        self.path = path
        self.error: EdgeVLMError | None = None  # raised where nobody above could see it
        self._file = DirectFile(path, expected)
        self._staging = staging
        self._progress = progress
        self._position = 0
        self._window: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._start = 0  # of the window in the file
        self._map: mmap.mmap | None = None

    def read(self, nbytes: int) -> memoryview:
        """Up to `nbytes` from here on, as much as one piece holds; empty at the end."""
        offset = self._position - self._start
        if not 0 <= offset < len(self._window):
            self._fill(self._position)
            offset = self._position - self._start
        part = self._window[offset : offset + nbytes]
        self._advance(len(part))
        return part.data

    def read_all(self, nbytes: int) -> memoryview:
        """Exactly `nbytes`, unless the file ends: what a reader of V1 must give."""
        nbytes = min(nbytes, self._file.size - self._position)
        offset = self._position - self._start
        if nbytes <= 0 or (offset >= 0 and offset + nbytes <= len(self._window)):
            return self.read(max(nbytes, 0))
        if nbytes <= self._staging.piece - PAGE:
            self._fill(self._position)
            return self.read(nbytes)
        start = self._position // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._unmap()
        self._map = self._file.map(start, self._position - start + nbytes)
        begin = self._position - start
        self._advance(nbytes)
        return memoryview(self._map)[begin : begin + nbytes]

    def seek(self, offset: int, whence: int) -> bool:
        """As os.lseek; False outside of the file."""
        base = (0, self._position, self._file.size)[whence]
        if not 0 <= base + offset <= self._file.size:
            return False
        self._position = base + offset
        return True

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._unmap()
        self._file.close()

    def _fill(self, position: int) -> None:
        start = position // PAGE * PAGE
        buffer = self._staging.reserve(self._staging.piece)
        count = self._file.read(buffer, start)
        self._start, self._window = start, buffer[:count]

    def _advance(self, nbytes: int) -> None:
        self._position += nbytes
        if self._progress is not None and nbytes:
            self._progress(self._position, self._file.size)

    def _unmap(self) -> None:
        if self._map is not None:
            window, self._map = self._map, None
            try:
                window.close()
            except BufferError:  # the caller still looks at it; its last view closes it
                pass
