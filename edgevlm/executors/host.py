"""Runs a bundle on the CPU with ONNX Runtime.

Inputs, outputs and the KV cache lie in pools of ours at planned offsets; what ONNX Runtime needs
between its nodes comes from one arena of exactly the planned size, shared by all graphs. Nothing
is taken after start: a run that needs more than the plan says is an error, not growth.
"""

import logging
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgevlm.bundle import Bundle, PhaseName, StageSpec, TensorSpec
from edgevlm.errors import ExecutorError
from edgevlm.memory_plan import ALIGNMENT, Placement, PoolName

log = logging.getLogger(__name__)

GIB = 1 << 30
SLACK = 4096  # bytes that the arena may waste here and there
MAX_BINDINGS = 32  # a decode step reuses its binding; prefill chunks come in few shapes
_REGISTERING = threading.Lock()  # ONNX Runtime keeps one registration for the whole process
POOLS: tuple[PoolName, ...] = ("kv_cache", "io", "vision_cache")


class HostExecutor:
    """The executor for the target `host`. See `Executor` for the verbs."""

    def __init__(self, bundle: Bundle, threads: int | None = None, *, touch: bool = True) -> None:
        """`touch` False: pages of the pools are taken when they are written, which is for a
        builder's check and never for a bundle in use."""
        self._touch = touch
        self.allocations_after_start = 0
        self._sealed = False
        self._closed = False
        plan = bundle.manifest.plan
        try:
            ours = sorted((p for p in plan.pools if p.name in POOLS), key=lambda p: -p.bytes)
            pools = {pool.name: self._take(pool.bytes) for pool in ours}
            self._placements = {p.name: p for p in plan.placements}
            self._views = {p.name: _view(pools[p.pool], p) for p in plan.placements}
            files = [s.file for stages in bundle.manifest.phases.values() for s in stages]
            paths = {file: bundle.file(file) for file in files}  # prefill and decode share one
            self._sessions, self._plugs = self._load_graphs(
                paths, threads or available_cores(), plan.pool("activations").bytes
            )
        except MemoryError as error:
            raise ExecutorError(
                f"the machine refused {plan.total_bytes:,} bytes that the plan needs; "
                "free memory or build with smaller limits"
            ) from error
        except Exception as error:  # ONNX Runtime raises classes of its own, one per status
            raise ExecutorError(f"ONNX Runtime cannot load {bundle.path}: {error}") from error
        self._phases = bundle.manifest.phases
        self._bindings: dict[tuple[Any, ...], list[tuple[Any, Any]]] = {}
        self._sealed = True

    def staging(self, name: str, rows: int, start: int = 0) -> NDArray[Any]:
        """The tensor's own rows: what is prepared here is already written."""
        view = self._view(name)
        _check_rows(name, rows, start, view)
        return view[start : start + rows]

    def write(self, name: str, array: NDArray[Any], start: int = 0) -> None:
        """Copy rows into the tensor, unless they already are its rows."""
        view = self._view(name)
        _check_rows(name, len(array), start, view)
        target = view[start : start + len(array)]
        if array.ctypes.data != target.ctypes.data:
            target[...] = array

    def run(self, phase: PhaseName, *, stage: int | None = None, **dims: int) -> None:
        """Run every stage of a phase, or one of them. Returns when it is done."""
        if self._closed:
            raise ExecutorError("this executor is closed; open the bundle again")
        key = (phase, *sorted(dims.items()))
        bindings = self._bindings.get(key)
        if bindings is None:
            if phase not in self._phases:
                raise ExecutorError(f"this bundle has no {phase} graph: its model reads text only")
            bindings = [self._bind(stage, dims) for stage in self._phases[phase]]
            if len(self._bindings) >= MAX_BINDINGS:
                del self._bindings[next(iter(self._bindings))]
            self._bindings[key] = bindings
        try:
            for session, binding in bindings if stage is None else (bindings[stage],):
                session.run_with_iobinding(binding)
        except Exception as error:  # as above: no common base class
            raise ExecutorError(f"ONNX Runtime failed in {phase} {dims}: {error}") from error

    def copy(self, source: str, row: int, target: str, target_row: int, rows: int) -> None:
        """Copy rows between tensors, at once."""
        from_view, to_view = self._view(source), self._view(target)
        _check_rows(source, rows, row, from_view)
        _check_rows(target, rows, target_row, to_view)
        to_view[target_row : target_row + rows] = from_view[row : row + rows]

    def read(self, name: str) -> NDArray[Any]:
        """The whole tensor; a view, valid until the next run."""
        return self._view(name)

    def close(self) -> None:
        """Let go of graphs and pools."""
        self._closed = True
        self._bindings.clear()
        self._sessions.clear()
        self._plugs.clear()
        self._views.clear()

    def _load_graphs(
        self, paths: dict[str, Path], threads: int, nbytes: int
    ) -> tuple[dict[str, Any], list[Any]]:
        return _load(paths, _session_options(threads), nbytes)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        if self._sealed:
            self.allocations_after_start += 1
            raise ExecutorError(f"{nbytes:,} bytes asked for after start; this is a bug in edgevlm")
        if not self._touch:
            # Not numpy's memory, which comes in huge pages: a cache is written here and there.
            return np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)[:nbytes]
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        raw.fill(0)  # touch every page now, so that the plan is a promise and not a hope
        skip = -raw.ctypes.data % ALIGNMENT
        return raw[skip : skip + nbytes]

    def _view(self, name: str) -> NDArray[Any]:
        try:
            return self._views[name]
        except KeyError:
            if self._closed:
                raise ExecutorError("this executor is closed; open the bundle again") from None
            raise ValueError(f"the plan has no tensor {name!r}") from None

    def _bind(self, stage: StageSpec, dims: dict[str, int]) -> tuple[Any, Any]:
        session = self._sessions[stage.file]
        binding = session.io_binding()
        for spec in stage.inputs:
            binding.bind_input(*self._address(spec, dims))
        for spec in stage.outputs:
            binding.bind_output(*self._address(spec, dims))
        return session, binding

    def _address(self, spec: TensorSpec, dims: dict[str, int]) -> tuple[Any, ...]:
        """Arguments of bind_input and bind_output. Raises ValueError beyond the placement."""
        placement = self._placements[spec.placement]
        shape = [dims[d] if isinstance(d, str) else d for d in spec.shape]
        offset = placement.row_bytes * (dims[spec.start] if spec.start else 0)
        nbytes = int(np.prod(shape)) * np.dtype(spec.dtype).itemsize
        if offset < 0 or offset + nbytes > placement.nbytes:
            raise ValueError(
                f"{spec.name} {shape} at byte {offset} does not fit {placement.name} "
                f"{list(placement.shape)}"
            )
        address = self._views[placement.name].ctypes.data + offset
        return spec.name, "cpu", 0, np.dtype(spec.dtype), shape, address


def available_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load(paths: dict[str, Path], options: Any, nbytes: int) -> tuple[dict[str, Any], list[Any]]:
    """A session for each graph, all on one arena of `nbytes`; and what keeps it from growing."""
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    # The arena counts packed weights too, and a limit that they pass no longer limits: so it is
    # more than they can be, and what they leave of it is plugged when they are there.
    limit = nbytes + GIB + 4 * sum(_graph_bytes(path) for path in paths.values())
    config = ort.OrtArenaCfg(
        {
            "max_mem": limit,
            "arena_extend_strategy": 1,  # as requested
            "max_dead_bytes_per_chunk": SLACK,  # a larger rest of a free piece is split off
        }
    )
    with _REGISTERING:
        # The latest registration serves the sessions made after it; earlier ones keep theirs.
        ort.create_and_register_allocator(memory, config)
        sessions = {
            file: ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            for file, path in paths.items()
        }
    return sessions, _seal(next(iter(sessions.values())), nbytes, limit)


def _graph_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def _seal(session: Any, nbytes: int, limit: int) -> list[Any]:
    """Make an arena hold `nbytes` and nothing ever after; returns what must be kept for that."""
    take = getattr(session, "create_ortvalue_from_shape_and_type", None)
    if take is None:  # ONNX Runtime before 1.32: the first runs take what they need
        return []
    region = take([nbytes], np.uint8, "cpu")
    region.numpy()[...] = 0  # touch every page now, so that the plan is a promise and not a hope
    plugs, size = [], limit
    while size >= SLACK:
        try:
            plugs.append(take([size], np.uint8, "cpu"))  # address space, not memory: never touched
        except Exception:  # "smaller than requested"
            size //= 2
    return plugs  # `region` goes back to the arena here, and is all that is free in it


def _session_options(threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # One block for all of a run would have to find room among the pieces of other shapes.
    options.enable_mem_pattern = False
    options.enable_mem_reuse = False  # a buffer that every layer reuses is held until the last one
    options.log_severity_level = 4  # what went wrong is in the exception
    options.add_session_config_entry("session.use_env_allocators", "1")
    # Weights are not activations: keep them out of the arena.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    return options


def _view(pool: NDArray[np.uint8], placement: Placement) -> NDArray[Any]:
    rows = pool[placement.offset : placement.offset + placement.nbytes]
    return rows.view(placement.dtype).reshape(placement.shape)


def _check_rows(name: str, rows: int, start: int, view: NDArray[Any]) -> None:
    if start < 0 or start + rows > len(view):
        raise ValueError(f"rows {start} to {start + rows} of {name}, which has {len(view)}")
