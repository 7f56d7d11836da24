"""What follows from a plan and a device: times from a roofline, peaks, disk, what else would fit.

Nothing here is measured on the device it speaks of; every time is a projection and says from what.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from builders.blocks import WeightPolicy
from builders.devices import Device
from builders.limits import MIN_SEQ_LEN, Planned
from builders.models import FAMILIES
from builders.planner import (
    text_stage_plans,
    vision_stage_plans,
)
from builders.room import COMPILER_BASE_BYTES as COMPILER_BASE_BYTES
from builders.room import COMPILER_FACTOR as COMPILER_FACTOR
from builders.room import compile_peak
from builders.solver import SEQ_STEP, TEXT_ROOM, largest
from builders.targets import Target
from edgevlm.config import Limits, ModelConfig, TextConfig, VisionConfig
from edgevlm.memory_plan import MemoryPlan
from edgevlm.preprocess import max_patches

QUESTION_TOKENS = 64  # of text beside the picture in the projected request
TEXT_PROMPT_TOKENS = 512  # of the projected request of a model that reads text only
BUILDER_BASE_BYTES = 220 << 20  # interpreter, numpy, onnx, and what malloc keeps
BUILDER_TOKENIZER_FACTOR = 6  # its text, and what is parsed of it
# fp32, codes, and scales of groups of 32. Built for the host, Qwen2.5-0.5B took 865 MB where this
# says 895, SmolLM2-135M 370 where it says 373.
WRITE_FACTOR = 4.57
COMPARED_PIXELS = (448 * 448, 1280 * 28 * 28, 2048 * 1536)


@dataclass(frozen=True)
class Figure:
    """Bytes and how they come about."""

    bytes: int
    formula: str


@dataclass(frozen=True)
class Projection:
    """One request on an idle device. Times in ms; `reason` says why there are none."""

    prompt_tokens: int
    image_tokens: int
    weight_bytes_per_token: int
    kv_bytes_per_step: int
    vision_ms: float | None = None
    prefill_ms: float | None = None
    first_token_ms: float | None = None
    decode_tok_s: float | None = None
    decode_tok_s_full_context: float | None = None
    assumptions: tuple[str, ...] = ()
    reason: str | None = None


def kv_bytes_per_token(text: TextConfig, host: bool) -> int:
    """Bytes of the cache for one token of one slot."""
    return (
        text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * (4 if host else 2)
    )


def project(model: ModelConfig, ledger: MemoryPlan, target: Target, device: Device) -> Projection:
    """First token and decode of one request with the largest picture, from a roofline."""
    host = target.executor == "host"
    patches = max_patches(model.image_processor) if model.image_processor else 0
    image = patches // model.image_processor.merge_size**2 if model.image_processor else 0
    wanted = image + QUESTION_TOKENS if image else TEXT_PROMPT_TOKENS
    tokens = min(wanted, ledger.limits.max_seq_len)
    kv = kv_bytes_per_token(model.text, host)
    weights = ledger.pool("weights.llm").bytes
    empty = Projection(tokens, min(image, tokens), weights, kv * tokens)
    bandwidth, peak, shares = device.bandwidth_gb_s, device.fp16_tflops, device.shares
    if host:
        return dataclasses.replace(empty, reason="CPU speed is measured, by `edgevlm bench`")
    if bandwidth is None or peak is None or shares is None:
        return dataclasses.replace(empty, reason=f"speed of {device.title}: {device.speed_source}")
    rate = bandwidth * 1e9 * shares.bandwidth
    chunks = math.ceil(tokens / ledger.limits.max_prefill_chunk)
    arithmetic = prefill_flop(model.text, tokens) / (peak * 1e12 * shares.prefill)
    prefill = max(arithmetic, chunks * weights / rate) * 1e3
    vision = 0.0
    if model.vision is not None:
        vision = vision_flop(model.vision, patches) / (peak * 1e12 * shares.vision) * 1e3
    return dataclasses.replace(
        empty,
        vision_ms=round(vision, 1),
        prefill_ms=round(prefill, 1),
        first_token_ms=round(vision + prefill, 1),
        decode_tok_s=round(rate / (weights + kv * tokens), 1),
        decode_tok_s_full_context=round(rate / (weights + kv * ledger.limits.max_seq_len), 1),
        assumptions=(
            f"bandwidth {bandwidth:g} GB/s x {shares.bandwidth:g} reached; "
            f"FP16 {peak:g} TFLOPS x {shares.prefill:g} in prefill, x {shares.vision:g} in vision",
            f"of the device: {device.speed_source}",
            f"of the shares reached: {shares.source}",
            f"read per token: weights.llm {weights:,} bytes and the cache, {kv:,} bytes for each "
            "token in it",
            f"prefill in {chunks} chunks, each reads the weights once; host work is not counted",
        ),
    )


def prefill_flop(text: TextConfig, tokens: int) -> float:
    """Layers on every token, causal attention, the head on the last token alone."""
    width, kv_width = (
        n * text.head_dim for n in (text.num_attention_heads, text.num_key_value_heads)
    )
    hidden = text.hidden_size
    layer = 2 * hidden * (width + kv_width) + 3 * hidden * text.intermediate_size
    attention = 2 * tokens**2 * width  # two products of 2 x T x T x width, half of them masked
    return (
        text.num_hidden_layers * (2.0 * layer * tokens + attention) + 2.0 * text.vocab_size * hidden
    )


def vision_flop(vision: VisionConfig, patches: int) -> float:
    """Blocks on every patch, attention over all or over a window, the merger on merged patches."""
    width, merge = vision.hidden_size, vision.spatial_merge_size**2
    gates = 3 if vision.hidden_act == "silu" else 2
    block = 4 * width**2 + gates * width * vision.intermediate_size
    full = vision.depth if vision.window_size is None else len(vision.fullatt_block_indexes)
    seen = full * patches
    if vision.window_size is not None:
        seen += (vision.depth - full) * (vision.window_size // vision.patch_size) ** 2
    merged = width * merge
    merger = merged**2 + merged * vision.out_hidden_size
    linear = vision.depth * block + width * vision.patch_dim + merger / merge
    return patches * (2.0 * linear + 4.0 * seen * width)


def load_peak(ledger: MemoryPlan, host: bool) -> Figure:
    """Loading takes what running takes: no weight is held twice."""
    how = "weights are mapped" if host else "weights stream once through the staging pool"
    return Figure(ledger.total_bytes, f"the plan's total: {how}; planned, not measured")


def build_peak(
    model: ModelConfig, policy: WeightPolicy, target: Target, tokenizer_bytes: int = 0
) -> Figure:
    """The larger of writing a graph and compiling a stage; they do not overlap."""
    shapes = FAMILIES[model.model_type].tensor_shapes(model)
    largest_tensor = max(math.prod(shape) for shape in shapes.values())
    write = BUILDER_BASE_BYTES + BUILDER_TOKENIZER_FACTOR * tokenizer_bytes
    write += int(WRITE_FACTOR * largest_tensor)
    formula = (
        f"interpreter and tokenizer + the largest tensor in fp32 and INT4, {largest_tensor:,} x "
        f"{WRITE_FACTOR}"
    )
    if target.executor != "host":
        bare = dataclasses.replace(model, image_processor=None)
        limit = target.stage_limit
        stages = [*text_stage_plans(bare, policy, limit), *vision_stage_plans(bare, limit)]
        stage = max(plan.bytes for plan in stages)
        compiling = compile_peak(stage)
        if compiling > write:
            return Figure(
                compiling,
                f"1.1 GB + 3.6 x the largest of {len(stages)} stages, {stage:,}: bounds what "
                "tensorrt-rtx 1.7.1 took for seven networks",
            )
    return Figure(write, formula)


def disk(ledger: MemoryPlan) -> Figure:
    """The bundle's files."""
    files = ("weights.llm", "weights.vision", "embedding_table")
    found = [pool for pool in ledger.pools if pool.name in files]
    return Figure(sum(pool.bytes for pool in found), " + ".join(pool.name for pool in found))


@dataclass(frozen=True)
class Fit:
    """The longest context that fits beside so many slots and pixels; None: none does."""

    slots: int
    max_pixels: int
    image_tokens: int
    max_seq_len: int | None


def what_fits(
    planned: Planned, full: ModelConfig, budget: int, slots: tuple[int, ...]
) -> list[Fit]:
    """Context x pixels x slots within a budget; the largest picture has to fit the context."""
    processor, limits = full.image_processor, planned.plan.limits
    caps = {0}
    if processor is not None:
        low, high = processor.min_pixels, processor.max_pixels
        caps = {p for p in COMPARED_PIXELS if low <= p <= high} | {limits.max_pixels}
    return [
        fit_of(planned, full, budget, count, cap)
        for count in sorted({*slots, limits.slots})
        for cap in sorted(caps)
    ]


def fit_of(planned: Planned, full: ModelConfig, budget: int, slots: int, pixels: int) -> Fit:
    """One cell of `what_fits`. `full`: the model before its pictures were capped."""
    wishes, ceiling = planned.wishes, full.text.max_position_embeddings

    def limits(seq_len: int) -> Limits:
        return dataclasses.replace(wishes.limits(seq_len, pixels), slots=slots)

    tokens = wishes.image_tokens(pixels) if pixels else 0
    longest = largest(
        MIN_SEQ_LEN, ceiling, SEQ_STEP, lambda seq_len: planned.size(limits(seq_len)) <= budget
    )
    if longest is not None and longest < (tokens + TEXT_ROOM if tokens else MIN_SEQ_LEN):
        longest = None
    return Fit(slots, pixels, tokens, longest)
