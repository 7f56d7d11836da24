"""What TensorRT calls back: our log, our allocator on the arena, our readers of engine files.

Their base classes live in whichever module is installed, so they are made by functions. What they
raise would end as a line on stderr, so they keep it for whoever called TensorRT.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgevlm.errors import BundleError, EdgeVLMError, ExecutorError
from edgevlm.executors.arena import Arena
from edgevlm.executors.loading import EngineReader
from edgevlm.executors.tensorrt_api import Api

log = logging.getLogger(__name__)

KEPT_ERRORS = 3


class Words:
    """The last errors that TensorRT logged."""

    def __init__(self) -> None:
        self._errors: list[str] = []

    def keep(self, message: str) -> None:
        """One more error."""
        self._errors = [*self._errors, message.strip()][-KEPT_ERRORS:]

    def take(self) -> str:
        """All kept errors as one text, and forget them."""
        errors, self._errors = self._errors, []
        return "; ".join(errors) or "it gives no reason"


class Owner:
    """Whose bytes TensorRT's next allocations are, and what was refused to it."""

    def __init__(self) -> None:
        self.name = "TensorRT"
        self.refusal: EdgeVLMError | None = None


def make_logger(trt: Any, words: Words) -> Any:
    """An ILogger that keeps errors for our messages and passes warnings on."""
    errors = (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR)
    warning = trt.ILogger.Severity.WARNING

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in errors:
                words.keep(message)
            elif severity == warning:
                log.warning("%s", message)

    return Logger()


def make_allocator(trt: Any, arena: Arena, owner: Owner) -> Any:
    """An IGpuAllocator on the arena. The bindings take 0 for a refusal."""

    def take(size: int) -> int:
        if size == 0:
            return 0
        try:
            return arena.allocate(size, owner.name)
        except ExecutorError as error:
            owner.refusal = _bare(error)
            return 0

    class Allocator(trt.IGpuAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IGpuAllocator.__init__(self)

        def allocate(self, size: int, alignment: int, flags: int) -> int:
            return take(size)  # cuMemAlloc aligns to more than TensorRT ever asks for

        def allocate_async(self, size: int, alignment: int, flags: int, stream: int) -> int:
            return take(size)

        def reallocate(self, address: int, alignment: int, new_size: int) -> int:
            return 0  # "not implemented": what is there stays as it is

        def deallocate(self, memory: int) -> bool:
            return memory == 0 or arena.free(memory)

        def deallocate_async(self, memory: int, stream: int) -> bool:
            return memory == 0 or arena.free(memory)

    return Allocator()


def make_reader(api: Api, reader: EngineReader) -> Any | None:
    """A stream reader of the newest kind that this release has; None: it wants bytes."""
    if api.has("stream_reader_v2"):
        return _reader_v2(api.module, reader)
    if api.has("stream_reader_v1"):
        return _reader_v1(api.module, reader)
    return None


def _reader_v2(trt: Any, reader: EngineReader) -> Any:
    """Reads come in pieces as large as we like."""

    class ReaderV2(trt.IStreamReaderV2):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamReaderV2.__init__(self)

        def read(self, num_bytes: int, stream: int) -> Any:
            return _guarded(reader, reader.read, num_bytes)

        def seek(self, offset: int, where: Any) -> bool:
            return reader.seek(offset, int(where))

    return ReaderV2()


def _reader_v1(trt: Any, reader: EngineReader) -> Any:
    """Reads must be whole, however large; 10.3 copies them once more into memory of its own."""

    class ReaderV1(trt.IStreamReader):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamReader.__init__(self)

        def read(self, size: int) -> Any:
            return _guarded(reader, reader.read_all, size)

    return ReaderV1()


def _guarded(reader: EngineReader, read: Callable[[int], Any], size: int) -> Any:
    try:
        return read(size)
    except EdgeVLMError as error:
        reader.error = _bare(error)
        return b""  # TensorRT takes it for the end and gives up


def _bare(error: EdgeVLMError) -> EdgeVLMError:
    """The same without its traceback, whose frames would keep engines beyond their memory."""
    return type(error)(str(error))


def read_bytes(path: Path) -> bytes:
    """The whole file: only for a release without readers. Raises BundleError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
