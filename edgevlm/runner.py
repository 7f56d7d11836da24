"""One model on one executor: token ids and pictures in, logits out.

Knows names, slots and positions; knows no text, no sampling, no address and no library.

| call | writes | runs | returns |
|---|---|---|---|
| encode_image | pixel_values, rope, windows | vision | - (rows of inputs_embeds, deepstack.N) |
| prefill | inputs_embeds, position_ids, write_indices | prefill, per chunk | float32 [vocab] |
| ingest | both of these, piece by piece | vision by stages, prefill by chunks | float32 [vocab] |
| decode | the same, one row per slot | decode | float32 [slots in the batch, vocab] |

Between two pieces of `ingest` anything may be decoded: decode has rows of its own.
"""

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgevlm.bundle import EMBEDDING_TABLE, Bundle, embedding_dtype
from edgevlm.executors.base import Executor
from edgevlm.positions import Grid, learned_positions, rope_rows, vision_rope, vision_windows
from edgevlm.preprocess import patchify
from edgevlm.prompt import Prompt
from edgevlm.vision_cache import VisionCache

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
Piece = Literal["vision", "prefill"]
CACHE = "vision_cache"

CLEARED = 256  # rows zeroed at a time


@dataclass
class Slot:
    """One sequence's place in the KV cache, and what lies there."""

    index: int
    keys: NDArray[np.int64] = field(repr=False)  # [max_seq_len]; the first `length` are valid
    length: int = 0
    delta: int = 0  # position of the next token minus `length`
    busy: bool = False

    def common_prefix(self, keys: NDArray[np.int64]) -> int:
        """How many tokens at the beginning of `keys` are already in this slot's cache."""
        n = min(self.length, len(keys))
        differ = np.flatnonzero(self.keys[:n] != keys[:n])
        return int(differ[0]) if len(differ) else n


class ModelRunner:
    """Runs vision, prefill and decode of one bundle; owns what the slots remember."""

    def __init__(self, bundle: Bundle, executor: Executor) -> None:
        manifest = bundle.manifest
        self.model = manifest.model
        self.limits = manifest.limits
        self.executor = executor
        self._plan = manifest.plan
        self._vision_stages = len(manifest.phases.get("vision", ()))
        # Features are kept whole or not at all: each place of theirs has its rows in the cache.
        places = manifest.feature_placements
        self._caches = {p: CACHE if p == "inputs_embeds" else f"{CACHE}.{p}" for p in places}
        rows = {p.name: p.shape[0] for p in manifest.plan.placements}
        cached = min((rows.get(name, 0) for name in self._caches.values()), default=0)
        self.vision_cache = VisionCache(cached)
        text = self.model.text
        table = np.memmap(
            bundle.file(EMBEDDING_TABLE),
            embedding_dtype(manifest.weights),
            mode="r",
            shape=(text.vocab_size, text.hidden_size),
        )
        self._embedding: NDArray[np.floating[Any]] = np.asarray(table)
        self.slots = [
            Slot(i, np.zeros(self.limits.max_seq_len, np.int64)) for i in range(self.limits.slots)
        ]
        self._positions = np.zeros(self.limits.slots, np.int64)
        self._lengths = np.zeros(self.limits.slots, np.int64)
        self._deepstack = [p for p in manifest.feature_placements if p != "inputs_embeds"]
        self._dirty = np.ones(self.limits.max_seq_len + self.limits.slots, np.bool_)
        self._clear_deepstack(0, len(self._dirty))
        every = np.arange(self.limits.max_seq_len)
        axes = 1 if text.rope.scheme == "plain" else 3
        self._write_rope(np.broadcast_to(every, (axes, len(every))), 0)

    def encode_image(self, resized: Image.Image, grid: Grid, row: int) -> None:
        """Write a resized picture's features into inputs_embeds from `row` on.

        `grid` (t, h, w) in patches is what `image_grid` gave for the picture before its resize.
        """
        for _ in self._vision_pieces(resized, grid, row):
            pass

    def prefill(
        self,
        slot: Slot,
        ids: I64,
        keys: I64,
        positions: I64,
        start: int,
        image_rows: NDArray[np.bool_] | None = None,
    ) -> F32:
        """Compute tokens `start`.. of a prompt in chunks; logits of the last position [vocab].

        `ids`, `keys` [n]; `positions` [1 or 3, n]; the first `start` tokens are in the slot's
        cache. Rows where `image_rows` is set were written by `encode_image`.
        """
        pieces = self._prefill_pieces(slot, ids, keys, positions, start, image_rows)
        while True:
            try:
                next(pieces)
            except StopIteration as done:
                logits: F32 = done.value
                return logits

    def reusable(self, slot: Slot, prompt: Prompt, keys: I64) -> int:
        """How many tokens of a prompt need not be computed again in this slot.

        The last one always is, for its logits; half a picture is no use: its rows come together.
        """
        cached = min(slot.common_prefix(keys), len(keys) - 1)
        for run in prompt.image_runs:
            if run.start < cached < run.start + run.length:
                cached = run.start
        return cached

    def ingest(
        self,
        slot: Slot,
        prompt: Prompt,
        keys: I64,
        pictures: Sequence[Image.Image],
        digests: Sequence[bytes],
        start: int,
    ) -> Generator[Piece, None, F32]:
        """Take a prompt into a slot from token `start` on, pausing after every piece of work.

        Yields the kind of the piece that was done; after the last piece it returns the logits
        [vocab], which are valid until the next run. `pictures` are resized; `digests` name them.
        Wherever it is left off, the slot remembers only what is true.
        """
        slot.length = start
        image_rows = np.zeros(len(keys), np.bool_)
        for run in prompt.image_runs:
            image_rows[run.start : run.start + run.length] = True
        for run in prompt.image_runs:
            if run.start >= start and not self._from_cache(digests[run.image], run.start):
                picture, grid = pictures[run.image], prompt.grids[run.image]
                for left in self._vision_pieces(picture, grid, run.start):
                    if not left:
                        self._into_cache(digests[run.image], run.start, run.length)
                    yield "vision"
        pieces = self._prefill_pieces(slot, prompt.ids, keys, prompt.positions, start, image_rows)
        return (yield from pieces)

    def forget(self) -> None:
        """Trust nothing that lies in a cache any more."""
        self.vision_cache.clear()
        for slot in self.slots:
            slot.length = 0

    def pools_in_use(self) -> tuple[tuple[str, int, int | None], ...]:
        """(name, bytes, bytes in use) of every pool; None where nobody counts."""
        tokens = sum(slot.length for slot in self.slots)
        capacity = self.limits.slots * self.limits.max_seq_len
        used: dict[str, int] = {}
        for pool in self._plan.pools:
            if pool.name == "kv_cache":
                used[pool.name] = pool.bytes * tokens // capacity
            elif pool.name == CACHE and self.vision_cache.rows:
                row = sum(self._plan.placement(name).row_bytes for name in self._caches.values())
                used[pool.name] = self.vision_cache.used * row
        return tuple((pool.name, pool.bytes, used.get(pool.name)) for pool in self._plan.pools)

    def _from_cache(self, digest: bytes, row: int) -> bool:
        """A picture that was seen before: its features into their places from `row` on."""
        if not self.vision_cache.rows:
            return False
        kept = self.vision_cache.find(digest)
        if kept is None:
            return False
        self._dirty[row : row + kept.length] = True
        for place, cache in self._caches.items():
            self.executor.copy(cache, kept.start, place, row, kept.length)
        return True

    def _into_cache(self, digest: bytes, row: int, length: int) -> None:
        kept = self.vision_cache.add(digest, length)
        if kept is not None:
            for place, cache in self._caches.items():
                self.executor.copy(place, row, cache, kept.start, length)

    def _vision_pieces(self, resized: Image.Image, grid: Grid, row: int) -> Iterator[int]:
        """The pixels, then the tower stage by stage; yields how many pieces are left."""
        vision, processor = self.model.vision, self.model.image_processor
        assert vision is not None and processor is not None
        patches = grid[0] * grid[1] * grid[2]
        pixels = self.executor.staging("pixel_values", patches)
        patchify(resized, processor, pixels)
        self.executor.write("pixel_values", pixels)
        cos, sin = vision_rope(grid, vision)
        self.executor.write("vision_cos", cos)
        self.executor.write("vision_sin", sin)
        if vision.num_position_embeddings is not None:
            index, weight = learned_positions(grid, vision)
            self.executor.write("pos_embed_index", index)
            self.executor.write("pos_embed_weight", weight)
        tokens = patches // vision.spatial_merge_size**2
        dims = {"num_patches": patches, "num_image_tokens": tokens, "image_row": row}
        if vision.window_size is not None:
            windows = vision_windows(grid, vision)
            mask = windows.window_mask
            self.executor.write("window_index", windows.window_index.reshape(mask.shape))
            self.executor.write("window_mask", mask)
            self.executor.write("window_position", windows.window_position)
            dims["num_windows"] = len(mask)
        self._dirty[row : row + tokens] = True
        yield self._vision_stages
        for stage in range(self._vision_stages):
            self.executor.run("vision", stage=stage, **dims)
            yield self._vision_stages - stage - 1

    def _prefill_pieces(
        self,
        slot: Slot,
        ids: I64,
        keys: I64,
        positions: I64,
        start: int,
        image_rows: NDArray[np.bool_] | None,
    ) -> Generator[Piece, None, F32]:
        """Chunks; a pause after each but the last, which returns the logits."""
        n = len(ids)
        slot.length = start
        slot.delta = 0  # a decode step of others may touch this slot before its prompt is whole
        for begin in range(start, n, self.limits.max_prefill_chunk):
            end = min(begin + self.limits.max_prefill_chunk, n)
            self._write_text_rows(ids, image_rows, begin, end)
            self._write_positions(positions, begin, end)
            self.executor.write("write_indices", np.array([begin], np.int64))
            self.executor.run(
                "prefill", batch_size=1, sequence_length=end - begin, row=begin, slot=slot.index
            )
            slot.keys[begin:end] = keys[begin:end]
            slot.length = end
            if end < n:
                yield "prefill"
        slot.delta = int(positions[:, -1].max()) + 1 - n
        logits: F32 = self.executor.read("logits")[0]
        return logits

    def decode(self, steps: Sequence[tuple[Slot, int]]) -> dict[int, NDArray[np.float32]]:
        """Add one token to each sequence in one batch; logits [vocab] by slot index.

        Raises ValueError where a slot is full.
        """
        low = min(slot.index for slot, _ in steps)
        high = max(slot.index for slot, _ in steps) + 1
        rows = self.executor.staging("inputs_embeds", high - low, self.limits.max_seq_len)
        for slot, token in steps:
            if slot.length >= self.limits.max_seq_len:
                raise ValueError(f"slot {slot.index} is full")
            rows[slot.index - low] = self._embedding[token]
            slot.keys[slot.length] = token
        for slot in self.slots[low:high]:
            # A slot that only lies in between writes one row past what it remembers.
            slot.length = min(slot.length, self.limits.max_seq_len - 1)
            self._lengths[slot.index] = slot.length
            self._positions[slot.index] = slot.length + slot.delta
        self.executor.write("inputs_embeds", rows, self.limits.max_seq_len)
        self.executor.write("position_ids", self._positions[low:high])
        self.executor.write("write_indices", self._lengths[low:high])
        self.executor.run(
            "decode",
            batch_size=high - low,
            sequence_length=1,
            row=self.limits.max_seq_len,
            slot=low,
        )
        for slot, _ in steps:
            slot.length += 1
        logits = self.executor.read("logits")
        return {slot.index: logits[slot.index - low] for slot, _ in steps}

    def _write_text_rows(
        self,
        ids: NDArray[np.int64],
        image_rows: NDArray[np.bool_] | None,
        begin: int,
        end: int,
    ) -> None:
        """Gather the embeddings of tokens begin..end, leaving the rows of pictures alone."""
        if image_rows is None or not image_rows[begin:end].any():
            self.executor.write("inputs_embeds", self._embedding[ids[begin:end]], begin)
            self._clear_deepstack(begin, end)
            return
        edges = np.flatnonzero(np.diff(image_rows[begin:end])) + begin + 1
        for low, high in itertools.pairwise([begin, *edges.tolist(), end]):
            if not image_rows[low]:
                self.executor.write("inputs_embeds", self._embedding[ids[low:high]], low)
                self._clear_deepstack(low, high)

    def _clear_deepstack(self, begin: int, end: int) -> None:
        """Rows of text add nothing: zeros where a picture has been since they were last cleared.

        The rows of decode are cleared at start, and no picture is ever there.
        """
        rows = np.flatnonzero(self._dirty[begin:end]) + begin
        if not len(rows) or not self._deepstack:
            return
        low, high = int(rows[0]), int(rows[-1]) + 1
        zeros = np.zeros((1, self.model.text.hidden_size), self._embedding.dtype)
        for name in self._deepstack:
            for at in range(low, high, CLEARED):
                count = min(CLEARED, high - at)
                self.executor.write(name, np.broadcast_to(zeros, (count, zeros.shape[1])), at)
        self._dirty[low:high] = False

    def _write_positions(self, positions: NDArray[np.int64], begin: int, end: int) -> None:
        """Point position_ids at the rope rows of tokens begin..end, writing them if need be."""
        chunk = positions[:, begin:end]
        if (chunk == chunk[0]).all():  # a row of the table that was written at start
            self.executor.write("position_ids", chunk[0])
            return
        first = self.limits.max_seq_len
        self._write_rope(chunk, first)
        self.executor.write("position_ids", np.arange(first, first + end - begin))

    def _write_rope(self, positions: NDArray[np.int64], row: int) -> None:
        cos, sin = rope_rows(positions, self.model.text)
        self.executor.write("rope_cos", cos, row)
        self.executor.write("rope_sin", sin, row)
