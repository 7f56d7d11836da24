"""Where each tensor of a run lies: the manifest's specs and a run's dims become addresses.

Pure arithmetic over the arena's addresses; it knows no vendor type. What has to be copied around a
run, because TensorRT wants aligned addresses or cannot write the cache itself, is worked out here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgevlm.bundle import PhaseName, StageSpec, TensorSpec
from edgevlm.config import Limits, ModelConfig
from edgevlm.errors import ExecutorError
from edgevlm.executors.cuda import Stream
from edgevlm.executors.tensorrt_stage import Binding, is_aligned
from edgevlm.memory_plan import Placement, tensor_bytes
from edgevlm.preprocess import max_patches

NEW, PAST = "new.", "past_key_values."


@dataclass(frozen=True)
class Copy:
    """Bytes that move on the device before or after a run."""

    to: int
    source: int
    bytes: int


@dataclass(frozen=True)
class Bound:
    """Everything that one run needs: per stage its bindings, and the copies around it."""

    stages: tuple[tuple[Binding, ...], ...]
    before: tuple[Copy, ...]
    after: tuple[Copy, ...]

    @property
    def copied(self) -> int:
        """Bytes that its copies move."""
        return sum(copy.bytes for copy in (*self.before, *self.after))


@dataclass(frozen=True)
class CacheCopy:
    """A `new.N.*` of a classic graph and the cache that it belongs into."""

    new: int
    past: int
    heads: int
    length: int  # tokens that the cache holds
    row: int  # bytes of one token of one head


class Binder:
    """Binds the stages of a bundle. `aligned` is where tensors go whose own row is not aligned."""

    def __init__(
        self,
        placements: Mapping[str, Placement],
        address: Callable[[str], int],
        aligned: Mapping[str, int],
    ) -> None:
        self._placements, self._address, self._aligned = placements, address, aligned

    def bind(self, stages: Sequence[StageSpec], dims: Mapping[str, int]) -> Bound:
        """Addresses and shapes of a run. Raises ValueError beyond a placement."""
        before: list[Copy] = []
        after: list[Copy] = []
        bound = []
        for stage in stages:
            inputs = [self._binding(spec, dims, True, before) for spec in stage.inputs]
            outputs = [self._binding(spec, dims, False, after) for spec in stage.outputs]
            bound.append((*inputs, *outputs))
        return Bound(tuple(bound), tuple(before), tuple(after))

    def cache_copies(self, stages: Sequence[StageSpec]) -> tuple[CacheCopy, ...]:
        """What a classic run leaves to be copied; nothing where graphs write the cache."""
        copies = []
        for spec in (spec for stage in stages for spec in stage.outputs):
            if not spec.name.startswith(NEW):
                continue
            past = self._placements[spec.name.replace(NEW, PAST)]
            _, heads, length, _ = past.shape
            row = past.row_bytes // heads // length
            new = self._address(spec.placement)
            copies.append(CacheCopy(new, self._address(past.name), heads, length, row))
        return tuple(copies)

    def _binding(
        self, spec: TensorSpec, dims: Mapping[str, int], is_input: bool, copies: list[Copy]
    ) -> Binding:
        placement = self._placements[spec.placement]
        shape = tuple(dims[d] if isinstance(d, str) else d for d in spec.shape)
        offset = placement.row_bytes * (dims[spec.start] if spec.start else 0)
        nbytes = tensor_bytes(shape, spec.dtype)
        if offset < 0 or offset + nbytes > placement.nbytes:
            raise ValueError(
                f"{spec.name} {list(shape)} at byte {offset} does not fit {placement.name} "
                f"{list(placement.shape)}"
            )
        address = self._address(placement.name) + offset
        if not is_aligned(address):
            home, address = address, self._aligned[spec.name]
            copies.append(Copy(address, home, nbytes) if is_input else Copy(home, address, nbytes))
        return Binding(spec.name, shape, address, is_input)


def aligned_bytes(
    phases: Mapping[str, Sequence[StageSpec]],
    placements: Mapping[str, Placement],
    model: ModelConfig,
    limits: Limits,
) -> dict[str, int]:
    """Bytes of each tensor that may begin at a row whose address is not aligned.

    Raises ExecutorError for a slot of the cache: that is too much to copy for each run.
    """
    tokens = max(limits.max_prefill_chunk, limits.slots)
    if model.vision is not None and model.image_processor is not None:
        merged = max_patches(model.image_processor) // model.vision.spatial_merge_size**2
        tokens = max(tokens, merged)
    found: dict[str, int] = {}
    for spec in (s for stages in phases.values() for stage in stages for s in _tensors(stage)):
        row = placements[spec.placement].row_bytes
        if spec.start is None or is_aligned(row):
            continue
        if spec.start == "slot":
            if limits.slots == 1:
                continue
            raise ExecutorError(
                f"a slot of {spec.placement} has {row:,} bytes, which is no multiple of what "
                "TensorRT's addresses must be; build with an even --max-seq-len"
            )
        found[spec.name] = tokens * row
    return found


def copy_new_cache(
    stream: Stream,
    copies: Sequence[CacheCopy],
    dims: Mapping[str, int],
    write_indices: Sequence[int],
    phase: PhaseName,
) -> None:
    """Put the new keys and values of a classic run where its tokens belong.

    new [B, heads, S, D] goes to past [slots, heads, length, D] at each sequence's write index.
    """
    batch, tokens, slot = dims["batch_size"], dims["sequence_length"], dims["slot"]
    for copy in copies:
        width, pitch = tokens * copy.row, copy.length * copy.row
        for i in range(batch):
            start = write_indices[i]
            if not 0 <= start <= copy.length - tokens:  # it would run into the next head
                raise ExecutorError(
                    f"{phase} of {tokens} tokens at {start} does not fit a cache of {copy.length}"
                )
            to = copy.past + (slot + i) * copy.heads * pitch + start * copy.row
            source = copy.new + i * copy.heads * width
            stream.rows_on_device(to, pitch, source, width, width, copy.heads)


def _tensors(stage: StageSpec) -> tuple[TensorSpec, ...]:
    return (*stage.inputs, *stage.outputs)
