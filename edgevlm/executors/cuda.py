"""The CUDA driver: a device, its streams, events and graphs. Every call is checked, every byte
copied is counted.

Driver API only, and of it only what any board has: no mempools, no managed memory, no
stream-ordered allocation. It knows no plan and no engine.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from edgevlm.errors import ExecutorError

log = logging.getLogger(__name__)

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no hidden order with the default stream
NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


@dataclass(frozen=True)
class DeviceFacts:
    """What the driver says of the GPU."""

    name: str
    compute_capability: tuple[int, int]
    integrated: bool
    total_bytes: int
    cuda_version: int  # 12060 is 12.6


@dataclass
class Copies:
    """Bytes handed to the copy engine so far, by direction."""

    h2d: int = 0
    d2h: int = 0
    d2d: int = 0


class Device:
    """A GPU and its primary context. Memory taken here is the caller's to give back."""

    def __init__(self, ordinal: int = 0) -> None:
        self.copied = Copies()
        self._context: Any = None
        call("starting CUDA", driver.cuInit, 0)
        self._device = call(f"looking for GPU {ordinal}", driver.cuDeviceGet, ordinal)
        self.facts = _facts(self._device)
        retain = driver.cuDevicePrimaryCtxRetain
        self._context = call("taking the GPU's context", retain, self._device)
        try:
            self.use()
        except ExecutorError:
            self.close()
            raise

    def use(self) -> None:
        """Make the context current in this thread: requests come from any thread."""
        if self._context is None:
            raise ExecutorError("this executor is closed; open the bundle again")
        call("entering the GPU's context", driver.cuCtxSetCurrent, self._context)

    def allocate(self, nbytes: int) -> int:
        """Device memory; its address."""
        return int(call("", driver.cuMemAlloc, nbytes))

    def free(self, address: int) -> None:
        """Give device memory back."""
        release("freeing device memory", driver.cuMemFree, address)

    def allocate_host(self, nbytes: int) -> int:
        """Pinned host memory; its address."""
        return int(call("", driver.cuMemHostAlloc, nbytes, 0))

    def free_host(self, address: int) -> None:
        """Give pinned memory back."""
        release("freeing pinned memory", driver.cuMemFreeHost, address)

    def synchronize(self) -> None:
        """Wait for everything."""
        call("waiting for the GPU", driver.cuCtxSynchronize)

    def close(self) -> None:
        """Let go of the context; safe to call twice."""
        if self._context is not None:
            self._context = None
            release("leaving the GPU", driver.cuDevicePrimaryCtxRelease, self._device)


class Stream:
    """Work that runs in order, beside other streams."""

    def __init__(self, device: Device, name: str) -> None:
        self.name = name
        self._copied = device.copied
        self._handle = call(f"making the stream {name}", driver.cuStreamCreate, NON_BLOCKING)
        self.handle = int(self._handle)

    def to_device(self, address: int, host: int, nbytes: int) -> None:
        """Enqueue a copy from pinned memory."""
        call("copying to the GPU", driver.cuMemcpyHtoDAsync, address, host, nbytes, self._handle)
        self._copied.h2d += nbytes

    def to_host(self, host: int, address: int, nbytes: int) -> None:
        """Enqueue a copy into pinned memory."""
        call("copying from the GPU", driver.cuMemcpyDtoHAsync, host, address, nbytes, self._handle)
        self._copied.d2h += nbytes

    def on_device(self, to: int, source: int, nbytes: int) -> None:
        """Enqueue a copy within device memory."""
        call("copying on the GPU", driver.cuMemcpyDtoDAsync, to, source, nbytes, self._handle)
        self._copied.d2d += nbytes

    def rows_on_device(
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        """Enqueue a copy of `rows` runs of `width` bytes, `pitch` bytes apart."""
        copy = driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch = driver.CUdeviceptr(source), source_pitch
        copy.dstDevice, copy.dstPitch = driver.CUdeviceptr(to), to_pitch
        copy.WidthInBytes, copy.Height = width, rows
        call("copying rows on the GPU", driver.cuMemcpy2DAsync, copy, self._handle)
        self._copied.d2d += width * rows

    def fill(self, address: int, value: int, nbytes: int) -> None:
        """Enqueue setting every byte."""
        call("clearing memory", driver.cuMemsetD8Async, address, value, nbytes, self._handle)

    def wait(self, event: "Event") -> None:
        """Let what follows wait for an event, without the host waiting."""
        call(f"ordering {self.name}", driver.cuStreamWaitEvent, self._handle, event.handle, 0)

    def synchronize(self) -> None:
        """Wait for all that is enqueued."""
        call(f"waiting for {self.name}", driver.cuStreamSynchronize, self._handle)

    def capture(self, enqueue: Callable[[], None]) -> "Graph":
        """Record what `enqueue` puts on this stream; none of it runs. Raises ExecutorError."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call("beginning a capture", driver.cuStreamBeginCapture, self._handle, mode)
        try:
            enqueue()
        except BaseException:
            _, template = driver.cuStreamEndCapture(self._handle)  # it has failed already
            if template is not None and int(template):
                release("dropping a capture", driver.cuGraphDestroy, template)
            raise
        template = call("ending a capture", driver.cuStreamEndCapture, self._handle)
        try:
            executable = call("making a graph", driver.cuGraphInstantiate, template, 0)
        finally:
            release("dropping a capture", driver.cuGraphDestroy, template)
        return Graph(executable)

    def launch(self, graph: "Graph") -> None:
        """Enqueue all that a graph recorded."""
        call("launching a graph", driver.cuGraphLaunch, graph.handle, self._handle)

    def close(self) -> None:
        """Give the stream back; safe to call twice."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            release(f"closing the stream {self.name}", driver.cuStreamDestroy, handle)


class Event:
    """A point in a stream that others wait for."""

    def __init__(self) -> None:
        self.handle = call("making an event", driver.cuEventCreate, NO_TIMING)

    def record(self, stream: Stream) -> None:
        """Put the point after what the stream holds now."""
        call("recording an event", driver.cuEventRecord, self.handle, stream.handle)

    def synchronize(self) -> None:
        """Wait until the stream has passed it; at once where it was never recorded."""
        call("waiting for an event", driver.cuEventSynchronize, self.handle)

    def close(self) -> None:
        """Give the event back; safe to call twice."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            release("closing an event", driver.cuEventDestroy, handle)


class Graph:
    """Recorded work, ready to launch."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def close(self) -> None:
        """Give the graph back; safe to call twice."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            release("closing a graph", driver.cuGraphExecDestroy, handle)


def call(doing: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the driver; what it returns beside its status. Raises ExecutorError with its words."""
    try:
        status, *values = function(*arguments)
    except RuntimeError as error:  # the bindings found no driver, or not this function in it
        words = str(error).strip().partition("\n")[0]
        raise ExecutorError(
            f"{doing or function.__name__}: there is no usable CUDA driver here ({words}); "
            "run this bundle on the board it was built for"
        ) from error
    if status:
        said = error_name(status)
        raise ExecutorError(f"{doing}: the CUDA driver says {said}" if doing else said)
    return values[0] if values else None


def release(doing: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Call the driver to give something back: it is gone whatever the driver answers."""
    (status,) = function(*arguments)
    if status:  # most often what an earlier kernel did wrong, told late
        log.warning("%s: the CUDA driver says %s", doing, error_name(status))


def error_name(status: Any) -> str:
    """CUDA_ERROR_..."""
    _, name = driver.cuGetErrorName(driver.CUresult(int(status)))
    return name.decode() if name else f"error {int(status)}"


def host_view(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Pinned memory as an array of bytes; it owns nothing."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _facts(device: Any) -> DeviceFacts:
    def attribute(name: str) -> int:
        kind = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(f"asking the GPU for {name}", driver.cuDeviceGetAttribute, kind, device))

    name = call("asking for the GPU's name", driver.cuDeviceGetName, 256, device)
    return DeviceFacts(
        name=name.partition(b"\0")[0].decode(errors="replace"),
        compute_capability=(
            attribute("COMPUTE_CAPABILITY_MAJOR"),
            attribute("COMPUTE_CAPABILITY_MINOR"),
        ),
        integrated=bool(attribute("INTEGRATED")),
        total_bytes=int(call("asking for memory", driver.cuDeviceTotalMem, device)),
        cuda_version=int(call("asking for the version", driver.cuDriverGetVersion)),
    )
