"""The memory plan from config.json alone: every pool with its bytes and its formula.

Knows sizes, not weights. After a build the compiler's figures take their place.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from builders.blocks import WeightPolicy
from builders.engine import StagePlan, plan_stages
from builders.lowering import host_memory
from builders.models import FAMILIES
from builders.quantize import choose_group_size, kept_16bit_reason
from builders.room import STAGE_BYTES
from builders.targets import Target
from builders.tensors import TensorShape, cache_shapes, io_shapes, new_cache_shapes
from edgevlm.bundle import embedding_dtype
from edgevlm.config import Limits, ModelConfig
from edgevlm.memory_plan import (
    DType,
    MemoryPlan,
    Placement,
    Pool,
    place,
    placed_bytes,
    tensor_bytes,
)
from edgevlm.memory_plan import with_report as with_report
from edgevlm.positions import max_windows
from edgevlm.preprocess import MAX_ASPECT_RATIO, max_patches

MIB = 1 << 20
# By benchmarks/bench_memory.py: 61 MiB are resident after the imports; the rest is what ONNX
# Runtime keeps per session and Python's heap.
HOST_RUNTIME_BYTES = 128 * MIB
# What tokenizers holds per byte of tokenizer.json, by the same benchmark.
TOKENIZER_FACTOR = 7
# CUDA context and TensorRT's libraries; a projection (PLATFORM: 300 to 500 MB), no board gave it.
TENSORRT_RUNTIME_BYTES = 500 * MIB
TENSORRT_STAGING_BYTES = 2 * 4 * MIB


def plan(
    model: ModelConfig,
    limits: Limits,
    policy: WeightPolicy,
    target: Target,
    lowering: str,
    *,
    budget_bytes: int | None = None,
    tokenizer_bytes: int = 0,
) -> MemoryPlan:
    """The ledger for one model, one set of limits and one target."""
    host = target.executor == "host"
    dtype: DType = "float32" if host else "float16"
    cache = place("kv_cache", cache_shapes(model.text, limits, dtype))
    io = place(
        "io",
        [
            *io_shapes(model, limits, dtype, tower_windows(model)),
            *_between_stages(model, limits, policy, target, lowering, dtype),
        ],
    )
    pools = [
        _llm_weights(_bare(model), policy, host),
        *_vision_weights(_bare(model), host),
        _cache_pool(model, limits, dtype, cache),
        Pool("io", placed_bytes(io), "sum of the placements in it, each aligned to 256"),
        _activations(model, limits, host),
    ]
    if not host:
        pools.append(Pool("staging", TENSORRT_STAGING_BYTES, "2 pinned buffers of 4 MiB"))
    pools.append(_runtime_pool(host, tokenizer_bytes))
    text = model.text
    kept = embedding_dtype(policy.weights)
    table = tensor_bytes((text.vocab_size, text.hidden_size), kept)
    formula = f"vocab {text.vocab_size} x hidden {text.hidden_size} x {kept}, a mapped file"
    pools.append(Pool("embedding_table", table, formula, reclaimable=True))
    return MemoryPlan(limits, tuple(pools), (*cache, *io), budget_bytes)


def _between_stages(
    model: ModelConfig,
    limits: Limits,
    policy: WeightPolicy,
    target: Target,
    lowering: str,
    dtype: DType,
) -> list[TensorShape]:
    """Hidden states between stages, and what a classic graph hands out for the cache."""
    if target.executor == "host":
        return []
    text = text_stage_plans(_bare(model), policy, target.stage_limit)
    vision = vision_stage_plans(_bare(model), target.stage_limit)
    shapes = stage_borders(model, limits, text, vision, dtype)
    if lowering == "classic":
        shapes += new_cache_shapes(model.text, limits, dtype)
    return shapes


def stage_borders(
    model: ModelConfig,
    limits: Limits,
    text: Sequence[StagePlan],
    vision: Sequence[StagePlan],
    dtype: DType,
) -> list[TensorShape]:
    """What passes from each stage to the next, at its largest."""
    tokens = max(limits.max_prefill_chunk, limits.slots)
    shapes: list[TensorShape] = [
        (f"hidden_states.{stage.first_layer}", dtype, (tokens, model.text.hidden_size))
        for stage in text[1:]
    ]
    if model.vision is not None and model.image_processor is not None:
        patches = max_patches(model.image_processor)
        shapes += [
            (f"vision_states.{stage.first_layer}", dtype, (patches, model.vision.hidden_size))
            for stage in vision[1:]
        ]
    return shapes


def tower_windows(model: ModelConfig) -> int:
    """The most attention windows that a picture can need; 0 for a tower without windows."""
    vision, processor = model.vision, model.image_processor
    if vision is None or processor is None or vision.window_size is None:
        return 0
    return max_windows(vision, max_patches(processor), MAX_ASPECT_RATIO)


# The solver asks for dozens of plans of one model, and what follows takes most of a plan's time.
@functools.lru_cache(maxsize=32)
def text_stage_plans(
    model: ModelConfig, policy: WeightPolicy, limit: int = STAGE_BYTES
) -> tuple[StagePlan, ...]:
    """The decoder's stages with the bytes of their weights, packed."""
    text, _ = _text_and_vision(model)
    layers = [0] * model.text.num_hidden_layers
    for name, shape in text.items():
        if name.startswith("model.layers."):
            layers[int(name.split(".")[2])] += _weight_bytes(shape, policy)
    return plan_stages(layers, _weight_bytes(text["lm_head.weight"], policy), limit)


@functools.lru_cache(maxsize=32)
def vision_stage_plans(model: ModelConfig, limit: int = STAGE_BYTES) -> tuple[StagePlan, ...]:
    """The tower's stages with the bytes of their weights; none where there is no tower."""
    if model.vision is None:
        return ()
    _, vision = _text_and_vision(model)
    blocks = [0] * model.vision.depth
    for name, shape in vision.items():
        block = int(name.split(".")[2]) if name.startswith("visual.blocks.") else -1
        if name.startswith(("visual.patch_embed", "visual.pos_embed")):
            block = 0
        elif name.startswith("visual.deepstack"):
            block = model.vision.deepstack_visual_indexes[int(name.split(".")[2])]
        blocks[block] += _elements([shape]) * 2
    return plan_stages(blocks, 0, limit)


def packed_int4_bytes(model: ModelConfig, policy: WeightPolicy) -> int:
    """Codes and fp16 scales of everything that a policy quantises."""
    text, _ = _text_and_vision(model)
    if policy.weights != "int4":
        return 0
    return sum(
        _weight_bytes(shape, policy)
        for shape in text.values()
        if len(shape) == 2 and choose_group_size(shape[1], policy.group_size) is not None
    )


def kept_16bit(model: ModelConfig, policy: WeightPolicy) -> list[dict[str, str]]:
    """What is not stored as INT4, and why: [{name, reason}]."""
    text, vision = _text_and_vision(model)
    kept = {"model.embed_tokens.weight": "its rows are looked up, not multiplied"}
    for name, shape in text.items():
        if len(shape) != 2:
            continue
        if policy.weights != "int4":
            kept[name] = f"built with --weights {policy.weights}"
        elif choose_group_size(shape[1], policy.group_size) is None:
            kept[name] = kept_16bit_reason(shape[1], policy.group_size)
    if vision:
        kept["visual.*"] = "the tower is never quantised: small text and edges are in its features"
    kept["norms and biases"] = "vectors: quantising them would save next to nothing"
    return [{"name": name, "reason": reason} for name, reason in kept.items()]


def _bare(model: ModelConfig) -> ModelConfig:
    """What weights depend on: the same model whatever its pictures are capped at."""
    return dataclasses.replace(model, image_processor=None)


def _weight_bytes(shape: tuple[int, ...], policy: WeightPolicy) -> int:
    if len(shape) == 2:
        return linear_bytes((shape[0], shape[1]), policy, host=False)
    return _elements([shape]) * 2


def linear_bytes(shape: tuple[int, int], policy: WeightPolicy, host: bool) -> int:
    """Bytes of a text matrix [N, K] in memory under a policy."""
    n, k = shape
    group = choose_group_size(k, policy.group_size) if policy.weights == "int4" else None
    if group is None:
        return n * k * (4 if host else 2)
    # fp16 scales on TensorRT; on the host fp32 scales, in the file and packed, and fp32 sums.
    return n * k // 2 + n * (k // group) * (12 if host else 2)


def _text_and_vision(model: ModelConfig) -> tuple[dict[str, tuple[int, ...]], ...]:
    shapes = FAMILIES[model.model_type].tensor_shapes(model)
    vision = {name: shape for name, shape in shapes.items() if name.startswith("visual.")}
    text = {n: s for n, s in shapes.items() if n not in vision and n != "model.embed_tokens.weight"}
    if model.text.tie_word_embeddings:
        text["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    return text, vision


def _elements(shapes: Iterable[tuple[int, ...]]) -> int:
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


@functools.lru_cache(maxsize=32)
def _llm_weights(model: ModelConfig, policy: WeightPolicy, host: bool) -> Pool:
    text, _ = _text_and_vision(model)
    matrices = [(s[0], s[1]) for s in text.values() if len(s) == 2]
    vectors = _elements(s for s in text.values() if len(s) == 1)
    nbytes = sum(linear_bytes(s, policy, host) for s in matrices) + vectors * (4 if host else 2)
    parameters = _elements(matrices) + vectors
    if policy.weights == "int4":
        scales = "12 bytes of scales and sums" if host else "an fp16 scale"
        how = f"4 bits and {scales} per group of {policy.group_size}"
    else:
        how = "fp32" if host else "fp16"
    return Pool("weights.llm", nbytes, f"{parameters:,} parameters, {how}")


@functools.lru_cache(maxsize=32)
def _vision_weights(model: ModelConfig, host: bool) -> tuple[Pool, ...]:
    _, vision = _text_and_vision(model)
    if not vision:
        return ()
    parameters = _elements(vision.values())
    width = 4 if host else 2
    return (Pool("weights.vision", parameters * width, f"{parameters:,} parameters x {width}"),)


def _cache_pool(model: ModelConfig, limits: Limits, dtype: str, cache: list[Placement]) -> Pool:
    text = model.text
    formula = (
        f"{text.num_hidden_layers} layers x 2 x {limits.slots} slots x "
        f"{text.num_key_value_heads} heads x {limits.max_seq_len} tokens x {text.head_dim} "
        f"x {dtype}"
    )
    return Pool("kv_cache", placed_bytes(cache), formula)


def _activations(model: ModelConfig, limits: Limits, host: bool) -> Pool:
    """The larger of prefill and vision: they never run at the same time."""
    patches = max_patches(model.image_processor) if model.image_processor else 0
    if host:
        nbytes, formula = host_memory.activation_bytes(model, limits, patches)
        return Pool("activations", nbytes, formula)
    text, vision = model.text, model.vision
    chunk = limits.max_prefill_chunk
    row = 2 * text.intermediate_size + 4 * text.hidden_size
    prefill = 2 * chunk * row * 2 + chunk * limits.max_seq_len * 3
    tower = 0
    if vision is not None:
        tower = patches * (6 * vision.hidden_size + 2 * vision.intermediate_size) * 2
    formula = (
        f"max(prefill: {chunk} tokens x 2 x {row} x 2 + mask, vision: {patches} patches x "
        "(6 x width + 2 x MLP) x 2)"
    )
    return Pool("activations", max(prefill, tower), formula)


def _runtime_pool(host: bool, tokenizer_bytes: int) -> Pool:
    base = HOST_RUNTIME_BYTES if host else TENSORRT_RUNTIME_BYTES
    what = "interpreter and libraries, measured" if host else "context and libraries, projected"
    nbytes = base + TOKENIZER_FACTOR * tokenizer_bytes
    return Pool("runtime", nbytes, f"{what} + {TOKENIZER_FACTOR} x tokenizer.json")
