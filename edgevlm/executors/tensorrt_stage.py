"""One engine of a phase: loaded, compared with the manifest, bound, enqueued.

Whatever TensorRT refuses becomes an error that names the engine and the tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgevlm.bundle import PhaseName, StageSpec, TensorSpec
from edgevlm.errors import ExecutorError
from edgevlm.executors.cuda import Stream
from edgevlm.executors.tensorrt_api import Api
from edgevlm.executors.tensorrt_callbacks import Words
from edgevlm.memory_plan import ALIGNMENT, DType

# The order in which builders/ give an engine its optimization profiles.
PROFILES: dict[PhaseName, int] = {"prefill": 0, "decode": 1, "vision": 0}
DATA_TYPES: dict[DType, str] = {
    "float32": "FLOAT",
    "float16": "HALF",
    "int64": "INT64",
    "int32": "INT32",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Binding:
    """A tensor's shape and address for one run."""

    name: str
    shape: tuple[int, ...]
    address: int
    is_input: bool


class Engine:
    """A deserialized engine and its contexts, one a phase."""

    def __init__(self, api: Api, words: Words, path: Path, engine: Any, spec: StageSpec) -> None:
        self.spec = spec
        self._api, self._words, self._path = api, words, path
        self._engine = engine
        self._contexts: dict[PhaseName, Any] = {}
        self._bound: dict[PhaseName, tuple[Binding, ...]] = {}
        self._check()

    @property
    def scratch_bytes(self) -> int:
        """What a context of it needs, over all profiles."""
        return int(self._engine.device_memory_size_v2)

    def add_context(
        self, phase: PhaseName, scratch: tuple[int, int], allocator: Any, stream: Stream
    ) -> None:
        """Make the context of a phase on shared scratch memory (address, bytes)."""
        engine, profile = self._engine, PROFILES[phase]
        if profile >= engine.num_optimization_profiles:
            raise self._refused(f"it has no profile for {phase}; build the bundle again")
        if self.scratch_bytes > scratch[1]:
            raise self._refused(
                f"it needs {self.scratch_bytes:,} bytes of scratch and the plan's activations pool "
                f"has {scratch[1]:,}; build the bundle again on this machine"
            )
        strategy = self._api.module.ExecutionContextAllocationStrategy.USER_MANAGED
        context = engine.create_execution_context(strategy)
        if context is None:
            raise self._refused(f"no context for {phase}: {self._words.take()}")
        self._contexts[phase] = context
        context.name = f"{self._path.stem} {phase}"
        context.temporary_allocator = allocator
        try:
            done = context.set_optimization_profile_async(profile, stream.handle)
        except RuntimeError as error:  # the bindings raise where C++ returns false
            raise self._refused(f"profile {profile} for {phase}: {error}") from error
        if not done:
            raise self._refused(f"profile {profile} for {phase}: {self._words.take()}")
        if scratch[1]:
            context.set_device_memory(*scratch)

    def enqueue(self, phase: PhaseName, bindings: tuple[Binding, ...], stream: Stream) -> None:
        """Bind, where the last run's bindings were others, and enqueue."""
        # No name for the context here: an error's traceback would keep it beyond `close`.
        if self._bound.get(phase) is not bindings:
            self._bound.pop(phase, None)
            self._bind(phase, bindings)
            self._bound[phase] = bindings
        if not self._contexts[phase].execute_async_v3(stream.handle):
            raise self._refused(f"{phase} was not enqueued: {self._words.take()}")

    def close(self) -> None:
        """Let go of contexts, then of the engine."""
        self._bound.clear()
        self._contexts.clear()
        self._engine = None

    def _bind(self, phase: PhaseName, bindings: tuple[Binding, ...]) -> None:
        contexts = self._contexts
        for b in bindings:
            if b.is_input and not contexts[phase].set_input_shape(b.name, b.shape):
                raise self._refused(f"shape {list(b.shape)} of {b.name}: {self._words.take()}")
            if not contexts[phase].set_tensor_address(b.name, b.address):
                raise self._refused(f"address {b.address:#x} of {b.name}: {self._words.take()}")
        try:
            missing = contexts[phase].infer_shapes()
        except RuntimeError as error:
            raise self._refused(f"the shapes of {phase}: {error}") from error
        if missing:
            raise self._refused(f"the shape of {', '.join(missing)} is not known")

    def _check(self) -> None:
        """The manifest's tensors are the engine's, with their types, all in device memory."""
        trt, engine = self._api.module, self._engine
        names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        wanted = {spec.name for spec in (*self.spec.inputs, *self.spec.outputs)}
        if names != wanted:
            odd = ", ".join(sorted(names ^ wanted))
            raise self._refused(f"it and the manifest differ in {odd}; build the bundle again")
        for spec, is_input in self._tensors():
            mode = engine.get_tensor_mode(spec.name)
            if (mode == trt.TensorIOMode.INPUT) != is_input:
                raise self._refused(f"{spec.name} is {mode} in it; build the bundle again")
            dtype = engine.get_tensor_dtype(spec.name)
            if dtype != getattr(trt.DataType, DATA_TYPES[spec.dtype]):
                raise self._refused(
                    f"{spec.name} is {dtype} in it and {spec.dtype} in the manifest; "
                    "build the bundle again"
                )
            if engine.get_tensor_location(spec.name) != trt.TensorLocation.DEVICE:
                raise self._refused(f"it wants {spec.name} in host memory; build the bundle again")
        self._check_aliases()

    def _check_aliases(self) -> None:
        """An output that the engine writes over an input must be placed there."""
        if not self._api.has("aliased_tensors"):
            return
        placements = {spec.name: (spec.placement, spec.start) for spec in self.spec.inputs}
        for spec in self.spec.outputs:
            alias = self._engine.get_aliased_input_tensor(spec.name)
            if alias and placements.get(alias) != (spec.placement, spec.start):
                raise self._refused(
                    f"{spec.name} is the same memory as {alias} in it and {spec.placement} in the "
                    "manifest; build the bundle again"
                )

    def _tensors(self) -> Iterator[tuple[TensorSpec, bool]]:
        yield from ((spec, True) for spec in self.spec.inputs)
        yield from ((spec, False) for spec in self.spec.outputs)

    def _refused(self, what: str) -> ExecutorError:
        return ExecutorError(f"TensorRT refused {self._path}: {what}")


def is_aligned(address: int) -> bool:
    """Whether TensorRT takes it as the address of a tensor."""
    return address % ALIGNMENT == 0
