"""Runs a bundle with TensorRT: JetPack's, a desktop's, or tensorrt-rtx.

All memory is taken, every context made and every decode graph captured when the executor starts;
then the arena is sealed. Vision has a stream of its own, ordered by events with the language
model's, since both use the same scratch memory. Only logits ever come back to the host.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.bundle import PHASES, Bundle, PhaseName
from edgevlm.errors import BundleError, ExecutorError
from edgevlm.executors.arena import Arena, drop_locals
from edgevlm.executors.cuda import Copies, Device, Event, Graph, Stream, host_view
from edgevlm.executors.loading import Progress
from edgevlm.executors.staging import Staging, split_staging
from edgevlm.executors.tensorrt_api import Flavour, load_api
from edgevlm.executors.tensorrt_binding import Binder, Bound, aligned_bytes, copy_new_cache
from edgevlm.executors.tensorrt_loading import EngineLoader
from edgevlm.executors.tensorrt_stage import Engine
from edgevlm.memory_plan import Placement, PoolName

log = logging.getLogger(__name__)

MAX_BINDINGS = 32  # prefill chunks come in few shapes
MAX_GRAPHS = 36  # every run of neighbouring slots, up to eight slots
CLOSED = "this executor is closed; open the bundle again"
WEIGHTS: dict[PoolName, tuple[PhaseName, ...]] = {
    "weights.llm": ("prefill", "decode"),
    "weights.vision": ("vision",),
}
Key = tuple[Any, ...]


class TensorRTExecutor:
    """The executor for TensorRT. See `Executor` for the verbs; `threads` is the host's business."""

    flavour: Flavour = "tensorrt"

    def __init__(
        self, bundle: Bundle, threads: int | None = None, progress: Progress | None = None
    ) -> None:
        self._lock = threading.RLock()
        self._closers: list[Callable[[], None]] = []  # in the order that things were taken
        self._closed = False
        self._bundle, self._progress = bundle, progress
        self._phases = bundle.manifest.phases
        self._limits = bundle.manifest.limits
        self._placements = {p.name: p for p in bundle.manifest.plan.placements}
        self._engines: dict[str, Engine] = {}
        self._bindings: dict[Key, Bound] = {}
        self._graphs: dict[Key, Graph] = {}
        self._features = set(bundle.manifest.feature_placements) | {"inputs_embeds"}
        self._vision_inputs = {
            spec.placement for stage in self._phases.get("vision", ()) for spec in stage.inputs
        }
        self._write_indices = np.zeros(self._limits.slots, np.int64)
        self._vision_pending = False  # the language model's stream has not waited for vision yet
        self._rows_to_read = 0
        self._arena: Arena | None = None
        try:
            self._take_everything()
            self._warm_up()
            assert self._arena is not None
            self._arena.seal()
        except BaseException as error:
            drop_locals(error)
            self.close()
            raise

    @property
    def allocations_after_start(self) -> int:
        """How often memory was asked for after start, and refused."""
        return 0 if self._arena is None else self._arena.refused

    @property
    def copied(self) -> Copies:
        """Bytes copied so far, by direction."""
        return self._device.copied

    @property
    def taken(self) -> dict[str, int]:
        """Bytes by pool."""
        return {} if self._arena is None else self._arena.taken()

    def staging(self, name: str, rows: int, start: int = 0) -> NDArray[Any]:
        """Pinned rows to fill and hand to `write` before anything else is staged."""
        with self._lock:
            self._enter()
            placement = self._placement(name, rows, start)
            shape, nbytes = (rows, *placement.shape[1:]), rows * placement.row_bytes
            if nbytes <= self._staging.piece:
                piece = self._staging.reserve(nbytes)
                rows_of: NDArray[Any] = piece.view(placement.dtype).reshape(shape)
                return rows_of
            return self._wide_rows(placement)[:rows]

    def write(self, name: str, array: NDArray[Any], start: int = 0) -> None:
        """Copy rows into the tensor, in its dtype; the array may change when this returns."""
        with self._lock:
            self._enter()
            placement = self._placement(name, len(array), start)
            if array.shape[1:] != placement.shape[1:]:
                raise ValueError(f"rows {array.shape[1:]} of {name}, which has {placement.shape}")
            if name == "write_indices":
                self._write_indices[start : start + len(array)] = array
            stream = self._vision if name in self._vision_inputs else self._compute
            if name in self._features:
                self._wait_for_vision()  # it may still be writing to these rows
            self._send(stream, placement, array, start)

    def run(self, phase: PhaseName, *, stage: int | None = None, **dims: int) -> None:
        """Enqueue every stage of a phase, or one stage of the tower."""
        with self._lock:
            self._enter()
            key = (phase, *sorted(dims.items()))
            if phase == "vision":
                self._run_vision(key, dims, stage)
            elif stage is not None:
                raise ValueError(f"stages of {phase} run together, not stage {stage} alone")
            else:
                self._run_text(phase, key, dims)

    def copy(self, source: str, row: int, target: str, target_row: int, rows: int) -> None:
        """Enqueue a copy on the device, in order with the tower and with what reads its rows."""
        with self._lock:
            self._enter()
            where = self._placement(source, rows, row), self._placement(target, rows, target_row)
            width = where[0].row_bytes
            if where[1].row_bytes != width:
                raise ValueError(f"rows of {source} and {target} are not equally wide")
            self._begin_vision()
            to = self._address(target) + target_row * width
            self._vision.on_device(to, self._address(source) + row * width, rows * width)
            self._vision_done.record(self._vision)

    def read(self, name: str) -> NDArray[Any]:
        """Wait, then the whole tensor; a view, valid until the next run."""
        with self._lock:
            self._enter()
            placement = self._placement(name, 0, 0)
            address = self._address(name)
            self._wait_for_vision()
            if name == "logits" and self._mirror is not None:
                nbytes = self._rows_to_read * placement.row_bytes
                if nbytes:
                    self._compute.to_host(self._mirror.ctypes.data, address, nbytes)
                self._compute.synchronize()
                self._rows_to_read = 0
                return self._mirror
            out = np.empty(placement.nbytes, np.uint8)
            self._staging.read(self._compute, address, out)
            return out.view(placement.dtype).reshape(placement.shape)

    def close(self) -> None:
        """Give everything back, last taken first; safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._settle()
            while self._closers:
                try:
                    self._closers.pop()()
                except ExecutorError as error:  # the rest must go back all the same
                    log.warning("closing: %s", error)

    def _settle(self) -> None:
        """Let what is running end, in the thread that closes."""
        if self._closers:
            try:
                self._device.use()
                self._device.synchronize()
            except ExecutorError as error:
                log.warning("closing: %s", error)

    def _take_everything(self) -> None:
        manifest = self._bundle.manifest
        self._api = load_api(self.flavour, manifest.lowering)
        self._device = Device()
        self._closers.append(self._device.close)
        self._compute = self._closing(Stream(self._device, "compute"))
        self._vision = self._closing(Stream(self._device, "vision"))
        self._compute_done = self._closing(Event())
        self._vision_done = self._closing(Event())
        fill = {
            pool: partial(self._load_engines, pool)
            for pool in WEIGHTS
            if any(p.name == pool for p in manifest.plan.pools)
        }
        arena = Arena(self._device, manifest.plan, fill)
        self._arena = arena
        sizes = aligned_bytes(self._phases, self._placements, manifest.model, self._limits)
        aligned = {name: arena.allocate(size, "aligned rows") for name, size in sizes.items()}
        self._binder = Binder(self._placements, arena.address, aligned)
        for name in ("kv_cache", "io"):
            for chunk in arena.chunks(name):  # 0 * NaN is NaN: what is masked must be finite
                self._compute.fill(chunk.address, 0, chunk.bytes)
        self._make_contexts(arena)
        decode = self._phases.get("decode", ())
        self._cache_copies = self._binder.cache_copies(decode)

    def _closing(self, thing: Any) -> Any:
        self._closers.append(thing.close)
        return thing

    def _load_engines(self, pool: PoolName, arena: Arena) -> None:
        """Called by the arena when it is the turn of a pool of weights."""
        if self._arena is None:
            self._begin_loading(arena)
        stages = {s.file: s for phase in WEIGHTS[pool] for s in self._phases.get(phase, ())}
        records = self._bundle.manifest.files
        self._loader.owner.name = pool
        for file in sorted(stages, key=lambda f: -records[f].bytes):
            loaded = self._loader.load(self._bundle, stages[file], self._progress)
            arena.before_close(loaded.close)
            self._engines[file] = loaded
        self._loader.owner.name = "TensorRT"

    def _begin_loading(self, arena: Arena) -> None:
        """What loading needs: the pinned ring, TensorRT's runtime and its allocator."""
        self._arena = arena
        self._closers.append(arena.close)
        pinned = next(iter(arena.chunks("staging")), None)
        if pinned is None:
            raise BundleError("the plan has no staging pool; build the bundle again")
        logits = self._placements["logits"]
        ring, kept = split_staging(pinned.bytes, logits.nbytes)
        self._staging = self._closing(Staging(pinned.address, ring))
        self._staging.connect(self._compute)
        self._staging.connect(self._vision)
        self._mirror: NDArray[Any] | None = None
        if kept:
            rows = host_view(pinned.address + ring, logits.nbytes)
            self._mirror = rows.view(logits.dtype).reshape(logits.shape)
        self._wide: dict[str, NDArray[Any]] = {}
        if "pixel_values" in self._placements:  # pictures that are wider than the ring
            placement = self._placements["pixel_values"]
            if placement.nbytes > self._staging.piece:
                self._wide_rows(placement)
        self._loader = EngineLoader(self._api, arena, self._staging)
        arena.before_close(self._loader.close)

    def _make_contexts(self, arena: Arena) -> None:
        scratch = next(iter(arena.chunks("activations")), None)
        where = (0, 0) if scratch is None else (scratch.address, scratch.bytes)
        for phase in PHASES:
            stream = self._vision if phase == "vision" else self._compute
            for stage in self._phases.get(phase, ()):
                self._engines[stage.file].add_context(phase, where, self._loader.allocator, stream)

    def _warm_up(self) -> None:
        """Run each phase once: kernels load at their first launch, and loading takes memory."""
        if "vision" in self._phases:
            self.run("vision", **self._smallest_picture())
        row = self._limits.max_seq_len
        for tokens in sorted({1, min(self._limits.max_prefill_chunk, row)}):
            self.run("prefill", batch_size=1, sequence_length=tokens, row=0, slot=0)
        for batch in range(1, self._limits.slots + 1):
            for slot in range(self._limits.slots - batch + 1):
                dims = {"batch_size": batch, "sequence_length": 1, "row": row, "slot": slot}
                self.run("decode", **dims)
                if len(self._graphs) < MAX_GRAPHS:
                    self._capture(("decode", *sorted(dims.items())))
        self._compute.synchronize()
        self._rows_to_read = 0

    def _smallest_picture(self) -> dict[str, int]:
        vision = self._bundle.manifest.model.vision
        assert vision is not None
        dims = {"num_patches": vision.spatial_merge_size**2, "num_image_tokens": 1, "image_row": 0}
        if vision.window_size is not None:
            dims["num_windows"] = 1
        return dims

    def _capture(self, key: Key) -> None:
        """Make one graph of all stages, for the addresses and shapes of this key."""
        bound = self._bindings[key]
        self._compute.synchronize()
        try:
            graph = self._compute.capture(lambda: self._enqueue("decode", bound, self._compute))
        except ExecutorError as error:
            log.warning("decode runs without a CUDA graph: %s", error)
            return
        self._graphs[key] = self._closing(graph)

    def _run_vision(self, key: Key, dims: dict[str, int], stage: int | None) -> None:
        bound = self._bound("vision", key, dims)
        self._begin_vision()
        self._enqueue("vision", bound, self._vision, stage)
        self._vision_done.record(self._vision)

    def _begin_vision(self) -> None:
        """What follows on the vision stream comes after all that is enqueued on the other."""
        if self._vision_pending:  # which has run nothing since the vision stream last waited
            return
        self._compute_done.record(self._compute)
        self._vision.wait(self._compute_done)  # one scratch memory for both
        self._vision_pending = True

    def _run_text(self, phase: PhaseName, key: Key, dims: dict[str, int]) -> None:
        bound = self._bound(phase, key, dims)
        self._wait_for_vision()
        graph = self._graphs.get(key)
        if graph is not None:
            self._compute.launch(graph)
            self._device.copied.d2d += bound.copied
        else:
            self._enqueue(phase, bound, self._compute)
        if self._cache_copies:
            indices = self._write_indices.tolist()
            copy_new_cache(self._compute, self._cache_copies, dims, indices, phase)
        self._rows_to_read = max(self._rows_to_read, dims["batch_size"])

    def _enqueue(
        self, phase: PhaseName, bound: Bound, stream: Stream, only: int | None = None
    ) -> None:
        """Every stage, or one, with the copies that belong before the first and after the last."""
        specs = self._phases[phase]
        if only is None or only == 0:
            for copy in bound.before:
                stream.on_device(copy.to, copy.source, copy.bytes)
        for i in range(len(specs)) if only is None else (only,):
            self._engines[specs[i].file].enqueue(phase, bound.stages[i], stream)
        if only is None or only == len(specs) - 1:
            for copy in bound.after:
                stream.on_device(copy.to, copy.source, copy.bytes)

    def _wait_for_vision(self) -> None:
        if self._vision_pending:
            self._compute.wait(self._vision_done)
            self._vision_pending = False

    def _bound(self, phase: PhaseName, key: Key, dims: dict[str, int]) -> Bound:
        bound = self._bindings.get(key)
        if bound is None:
            if phase not in self._phases:
                raise ExecutorError(f"this bundle has no {phase} graph: its model reads text only")
            bound = self._binder.bind(self._phases[phase], dims)
            spare = [k for k in self._bindings if k not in self._graphs]
            if len(spare) >= MAX_BINDINGS:
                del self._bindings[spare[0]]
            self._bindings[key] = bound
        return bound

    def _send(self, stream: Stream, placement: Placement, array: NDArray[Any], start: int) -> None:
        address = self._address(placement.name) + start * placement.row_bytes
        staged = self._staging.holds(array.ctypes.data) and array.dtype == placement.dtype
        if staged and array.flags.c_contiguous:
            self._staging.send(stream, address, array.reshape(-1).view(np.uint8))
            return
        rows = max(1, self._staging.piece // placement.row_bytes)
        for first in range(0, len(array), rows):
            part: NDArray[Any] = array[first : first + rows]
            piece = self._staging.reserve(len(part) * placement.row_bytes)
            piece.view(placement.dtype).reshape(part.shape)[...] = part
            self._staging.send(stream, address + first * placement.row_bytes, piece)

    def _wide_rows(self, placement: Placement) -> NDArray[Any]:
        """Ordinary memory for what the ring cannot hold at once; made once."""
        if placement.name not in self._wide:
            self._wide[placement.name] = np.zeros(placement.shape, placement.dtype)
        return self._wide[placement.name]

    def _enter(self) -> None:
        if self._closed:
            raise ExecutorError(CLOSED)
        self._device.use()

    def _placement(self, name: str, rows: int, start: int) -> Placement:
        placement = self._placements.get(name)
        if placement is None:
            raise ValueError(f"the plan has no tensor {name!r}")
        if start < 0 or start + rows > placement.shape[0]:
            raise ValueError(
                f"rows {start} to {start + rows} of {name}, which has {placement.shape[0]}"
            )
        return placement

    def _address(self, name: str) -> int:
        assert self._arena is not None
        return self._arena.address(name)


class TensorRTRTXExecutor(TensorRTExecutor):
    """The same on tensorrt-rtx, for the RTX cards of desktops."""

    flavour: Flavour = "tensorrt-rtx"
