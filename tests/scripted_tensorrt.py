"""A module that stands in for `tensorrt`: the same names, ONNX Runtime inside, stub memory below.

As strict as the real one where that is known: it refuses unaligned addresses, shapes outside of
the profile, aliased tensors at two addresses, a context without scratch memory; it swallows what
callbacks raise; and its work waits on the stub's streams, in graphs as well.

An engine file is MAGIC, the length of a JSON header, the header, and an ONNX model with its
weights inside. The header has `profiles` (dim -> [min, max]), `scratch` and `weights` (bytes).
"""

import ctypes
import functools
import json
import struct
import types
from collections.abc import Callable, Sequence
from enum import IntEnum
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from tests.cuda_stub import HostFunction, Stub

MAGIC = b"SCRIPTED"
ALIGNMENT = 256
Shape = tuple[int, ...]


def write_engine(
    onnx_path: Path,
    engine_path: Path,
    profiles: Sequence[dict[str, tuple[int, int]]],
    scratch: int = 4096,
) -> None:
    """Make an engine file of a graph; INT4 under its standard name, for ONNX Runtime."""
    model = onnx.load(onnx_path)
    weights = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    header = {"profiles": list(profiles), "scratch": scratch, "weights": weights}
    text = json.dumps(header).encode()
    body = model.SerializeToString()
    sizes = struct.pack("<QQ", len(text), len(body))
    engine_path.write_bytes(MAGIC + sizes + text + body)


class DataType(IntEnum):
    FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64, INT4 = range(10)


class TensorIOMode(IntEnum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(IntEnum):
    DEVICE, HOST = range(2)


class SeekPosition(IntEnum):
    SET, CUR, END = range(3)


class ExecutionContextAllocationStrategy(IntEnum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class Severity(IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    Severity = Severity

    def log(self, severity: Severity, message: str) -> None:
        raise NotImplementedError


class _Callback:
    """A base whose constructor must be called, as pybind11's must."""

    def __init__(self) -> None:
        self.constructed = True


class IGpuAllocator(_Callback):
    pass


class IStreamReader(_Callback):
    pass


class IStreamReaderV2(_Callback):
    pass


DTYPES = {
    onnx.TensorProto.FLOAT: (DataType.FLOAT, np.dtype(np.float32)),
    onnx.TensorProto.FLOAT16: (DataType.HALF, np.dtype(np.float16)),
    onnx.TensorProto.INT64: (DataType.INT64, np.dtype(np.int64)),
    onnx.TensorProto.BOOL: (DataType.BOOL, np.dtype(np.bool_)),
}


class Faults:
    """What a test lets go wrong: tensors that are refused, calls that return nothing."""

    def __init__(self) -> None:
        self.shapes: set[str] = set()
        self.addresses: set[str] = set()
        self.host_tensors: set[str] = set()
        self.no_engine = self.no_context = self.no_profile = self.no_enqueue = False
        self.no_shapes = False
        self.crash = False  # the work itself fails, long after it was enqueued
        self.allocate_at_enqueue = 0


class Scripted:
    """The module's state: which release it plays, on which stub, and what goes wrong."""

    def __init__(self, stub: Stub, version: str) -> None:
        self.stub, self.version = stub, version
        self.faults = Faults()
        self.sources: list[str] = []  # the kinds of readers that engines came from
        self.runs: list[str] = []  # names of contexts, when their work really ran

    def has(self, since: tuple[int, int]) -> bool:
        return tuple(int(n) for n in self.version.split(".")[:2]) >= since

    def module(self) -> types.ModuleType:
        """The module, with the names that this release has."""
        module: Any = types.ModuleType("tensorrt")
        module.__version__ = self.version
        module.__spec__ = ModuleSpec("tensorrt", None)  # other libraries look whether it is there
        for kind in (DataType, TensorIOMode, TensorLocation, ILogger, IGpuAllocator):
            setattr(module, kind.__name__, kind)
        module.ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
        if self.has((10, 7)):
            module.IStreamReaderV2, module.SeekPosition = IStreamReaderV2, SeekPosition
        if not self.has((11, 0)):
            module.IStreamReader = IStreamReader
        module.Runtime = lambda logger: Runtime(self, logger)
        return module


class Runtime:
    def __init__(self, scripted: Scripted, logger: ILogger) -> None:
        self.scripted, self.logger = scripted, logger
        self.gpu_allocator: Any = None

    def deserialize_cuda_engine(self, source: Any) -> "ICudaEngine | None":
        if self.scripted.faults.no_engine:
            self.logger.log(Severity.ERROR, "Serialized engine is not compatible")
            return None
        read = self._reader(source)
        head = read(len(MAGIC) + 16)
        if head[: len(MAGIC)] != MAGIC:
            self.logger.log(Severity.ERROR, "Magic tag does not match")
            return None
        sizes = struct.unpack("<QQ", head[len(MAGIC) :])
        text, body = read(sizes[0]), read(sizes[1])
        if len(body) != sizes[1]:
            self.logger.log(Severity.ERROR, "Size specified in header does not match archive size")
            return None
        header = json.loads(text)
        address = self.gpu_allocator.allocate(header["weights"], ALIGNMENT, 0)
        if not address and header["weights"]:
            self.logger.log(Severity.ERROR, "Requested amount of GPU memory could not be allocated")
            return None
        return ICudaEngine(self, header, body, address)

    def _reader(self, source: Any) -> Callable[[int], bytes]:
        self.scripted.sources.append(type(source).__mro__[1].__name__)
        if isinstance(source, IStreamReaderV2):
            return lambda n: read_v2(source, n)
        if isinstance(source, IStreamReader):
            return lambda n: bytes(source.read(n)) if n else b""  # type: ignore[attr-defined]
        data, at = bytes(source), 0

        def read(nbytes: int) -> bytes:
            nonlocal at
            at += nbytes
            return data[at - nbytes : at]

        return read


def read_v2(source: Any, wanted: int) -> bytes:
    """As python/src/infer/pyCore.cpp: ask again for what is missing, copy each piece at once."""
    out = bytearray()
    while len(out) < wanted:
        piece = memoryview(source.read(wanted - len(out), 0))
        if piece.nbytes == 0:
            break
        out += piece[: wanted - len(out)]
    return bytes(out)


class Compiled:
    """A model in ONNX Runtime, and its border."""

    def __init__(self, body: bytes) -> None:
        graph = onnx.load_from_string(body).graph
        self.inputs = {value.name: value.type.tensor_type for value in graph.input}
        self.outputs = {value.name: value.type.tensor_type for value in graph.output}
        self.aliases = {
            node.output[0]: node.input[0]
            for node in graph.node
            if node.op_type == "TensorScatter" and node.output[0] in self.outputs
        }
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        self.session = ort.InferenceSession(body, options, providers=["CPUExecutionProvider"])


@functools.lru_cache(maxsize=64)
def compiled_model(body: bytes) -> Compiled:
    """Made once: many tests load the same engine many times."""
    return Compiled(body)


class ICudaEngine:
    num_optimization_profiles: int

    def __init__(self, runtime: Runtime, header: dict[str, Any], body: bytes, weights: int) -> None:
        self.runtime, self.scripted = runtime, runtime.scripted
        self.log, self.allocator = runtime.logger.log, runtime.gpu_allocator
        self.profiles = header["profiles"]
        self.num_optimization_profiles = len(self.profiles)
        self.device_memory_size_v2 = header["scratch"]
        self._weights = weights
        compiled = compiled_model(body)
        self.inputs, self.outputs = compiled.inputs, compiled.outputs
        self.aliases, self.session = compiled.aliases, compiled.session
        self._names = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self._names)
        if self.scripted.has((10, 15)):
            self.get_aliased_input_tensor = self.aliases.get

    def __del__(self) -> None:
        if getattr(self, "_weights", 0):
            assert self.allocator.deallocate(self._weights), "weights freed before their engine"

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DTYPES[self.tensor(name).elem_type][0]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation(name in self.scripted.faults.host_tensors)

    def create_execution_context(self, strategy: Any) -> "IExecutionContext | None":
        if self.scripted.faults.no_context:
            self.log(Severity.ERROR, "Cannot create a context")
            return None
        assert strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        return IExecutionContext(self)

    def tensor(self, name: str) -> Any:
        return self.inputs.get(name) or self.outputs[name]


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self.engine, self.scripted = engine, engine.scripted
        self.name = ""
        self.temporary_allocator: Any = None
        self._profile: dict[str, Any] | None = None
        self._scratch: tuple[int, int] | None = None
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}
        self._enqueued: list[Any] = []  # the stub calls them later, in graphs many times

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        if self.scripted.faults.no_profile:
            raise RuntimeError("Error in set optimization profile async.")
        self._profile = self.engine.profiles[index]
        return bool(stream)

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % ALIGNMENT == 0 and size >= self.engine.device_memory_size_v2
        self._scratch = (address, size)

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        if name not in self.engine.inputs or name in self.scripted.faults.shapes:
            return self._refuse(f"set_input_shape: {name} does not satisfy its profile")
        assert self._profile is not None
        for size, dim in zip(shape, self.engine.inputs[name].shape.dim, strict=True):
            low, high = (dim.dim_value,) * 2
            if dim.dim_param:
                low, high = self._profile[dim.dim_param]
            if not low <= size <= high:
                return self._refuse(f"{name}: {size} is not within {low}..{high} ({dim})")
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        known = name in self.engine.inputs or name in self.engine.outputs
        if not known or address % ALIGNMENT or name in self.scripted.faults.addresses:
            return self._refuse(f"set_tensor_address: {name} at {address:#x}")
        self._addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        if self.scripted.faults.no_shapes:
            raise RuntimeError("shape inference failed")
        return [name for name in self.engine.inputs if name not in self._shapes]

    def execute_async_v3(self, stream: int) -> bool:
        faults = self.scripted.faults
        if faults.no_enqueue or self._profile is None or self.infer_shapes():
            return self._refuse("enqueue failed")
        if len(self._addresses) != self.engine.num_io_tensors:
            return self._refuse("a tensor has no address")
        if self.engine.device_memory_size_v2 and self._scratch is None:
            return self._refuse("no device memory")
        for output, source in self.engine.aliases.items():
            if self._addresses[output] != self._addresses[source]:
                return self._refuse(f"{output} is not where {source} is")
        if faults.allocate_at_enqueue:
            if not self.temporary_allocator.allocate(faults.allocate_at_enqueue, ALIGNMENT, 0):
                return self._refuse("no memory for a temporary")
        work = _Work(self, dict(self._shapes), dict(self._addresses), self._scratch)
        function = HostFunction(work)
        self._enqueued.append(function)
        status = self.scripted.stub.lib.stub_enqueue(stream, function, None)
        return status == 0 or self._refuse(f"CUDA error {status}")

    def _refuse(self, message: str) -> bool:
        self.engine.log(Severity.ERROR, message)
        return False


class _Work:
    """One enqueued execution, with the bindings of that moment."""

    def __init__(
        self,
        context: IExecutionContext,
        shapes: dict[str, Shape],
        addresses: dict[str, int],
        scratch: tuple[int, int] | None,
    ) -> None:
        self.engine, self.name, self.scripted = context.engine, context.name, context.scripted
        self.shapes, self.addresses, self.scratch = shapes, addresses, scratch

    def __call__(self, _: Any) -> int:
        if self.scripted.faults.crash:
            return 1
        try:
            self._run()
        except Exception as error:  # ctypes would print and go on
            print("scripted engine:", error)
            return 1
        return 0

    def _run(self) -> None:
        self.scripted.runs.append(self.name)
        if self.scratch is not None:
            ctypes.memset(self.scratch[0], 0xAB, self.scratch[1])
        binding = self.engine.session.io_binding()
        dims: dict[str, int] = {}
        for name, shape in self.shapes.items():
            tensor = self.engine.inputs[name]
            dims |= {d.dim_param: n for d, n in zip(tensor.shape.dim, shape, strict=True)}
            binding.bind_input(name, "cpu", 0, self._dtype(tensor), shape, self.addresses[name])
        copied = []
        for name, tensor in self.engine.outputs.items():
            sizes = [d.dim_value or dims.get(d.dim_param) for d in tensor.shape.dim]
            if None in sizes:  # a size that only the run itself knows
                binding.bind_output(name, "cpu")
                copied.append(name)
            else:
                address = self.addresses[name]
                binding.bind_output(name, "cpu", 0, self._dtype(tensor), sizes, address)
        self.engine.session.run_with_iobinding(binding)
        values = dict(zip(self.engine.outputs, binding.get_outputs(), strict=True))
        for name in copied:
            array: NDArray[Any] = values[name].numpy()
            ctypes.memmove(self.addresses[name], array.ctypes.data, array.nbytes)

    @staticmethod
    def _dtype(tensor: Any) -> np.dtype[Any]:
        return DTYPES[tensor.elem_type][1]
