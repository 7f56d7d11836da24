"""qwen3_vl: the qwen3 decoder with interleaved M-RoPE and DeepStack, and a tower that feeds both.

The tower is Qwen2-VL's with learned positions beside the rotary ones; its published names differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from builders.config_reader import ConfigReader
from builders.models.generation import read_generation
from builders.models.images import (
    check_vision,
    merger_shapes,
    read_image_processor,
    read_image_tokens,
    read_vision_sizes,
)
from builders.models.qwen3 import HEAD_DIM
from builders.models.text import read_text, require_mrope, text_shapes
from builders.stored import Stored
from edgevlm.config import ModelConfig, TextConfig, VisionConfig

ROPE_THETA = 10_000.0  # of the tower
PUBLISHED = (  # parts of canonical names, and how the published files spell them
    (".ln_q.", ".norm."),
    (".mlp.0.", ".linear_fc1."),
    (".mlp.2.", ".linear_fc2."),
    (".mlp.fc1.", ".mlp.linear_fc1."),
    (".mlp.fc2.", ".mlp.linear_fc2."),
)


def read_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    preprocessor: Mapping[str, Any] | None,
    tokenizer_eos: tuple[int, ...],
) -> ModelConfig:
    """The published layout is nested; its decoder has a layer for each deepstack feature."""
    root = ConfigReader(config, "config.json")
    reader = root.section("vision_config")
    indexes = _deepstack(reader)
    root.section("text_config").require("attention_bias", False, default=False)
    text = read_text(
        root,
        "qwen3_vl",
        attention_bias=False,
        default_theta=500_000.0,
        qk_norm=True,
        default_head_dim=HEAD_DIM,
        interleaved=True,
        deepstack=len(indexes),
    )
    require_mrope(root, text)
    if len(indexes) > text.num_hidden_layers:
        raise reader.mistyped(
            "deepstack_visual_indexes",
            list(indexes),
            f"at most one for each of num_hidden_layers {text.num_hidden_layers}",
        )
    vision = _read_vision(reader, text, indexes)
    return ModelConfig(
        model_type="qwen3_vl",
        text=text,
        generation=read_generation(generation, root, tokenizer_eos),
        vision=vision,
        image_processor=read_image_processor(preprocessor, vision),
        image_tokens=read_image_tokens(root, text),
    )


def _deepstack(reader: ConfigReader) -> tuple[int, ...]:
    """Which blocks go to the decoder: the order is that of its layers."""
    indexes = reader.ints("deepstack_visual_indexes", (8, 16, 24))
    if any(block >= reader.int("depth", 27) for block in indexes) or len(set(indexes)) < len(
        indexes
    ):
        raise reader.mistyped(
            "deepstack_visual_indexes",
            list(indexes),
            f"different blocks, all below depth {reader.int('depth', 27)}",
        )
    return indexes


def _read_vision(reader: ConfigReader, text: TextConfig, indexes: tuple[int, ...]) -> VisionConfig:
    """The learned table is square; the rotary base is not a choice."""
    reader.require("hidden_act", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    if "rope_parameters" in reader:
        rope = reader.section("rope_parameters")
        rope.require("rope_type", "axial", "default", default="axial")
        rope.require("rope_theta", ROPE_THETA, int(ROPE_THETA), default=ROPE_THETA)
    places = reader.int("num_position_embeddings", 2304)
    if math.isqrt(places) ** 2 != places:
        raise reader.mistyped("num_position_embeddings", places, "the square of an integer")
    vision = VisionConfig(
        model_type="qwen3_vl",
        hidden_size=reader.int("hidden_size"),
        intermediate_size=reader.int("intermediate_size"),
        out_hidden_size=reader.int("out_hidden_size"),
        hidden_act="gelu_pytorch_tanh",
        num_position_embeddings=places,
        deepstack_visual_indexes=indexes,
        **read_vision_sizes(reader, patch_size=16),
    )
    check_vision(reader, vision, text)
    return vision


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the family needs, by canonical name."""
    vision = config.vision
    assert vision is not None and vision.num_position_embeddings is not None
    width, mlp, out = vision.hidden_size, vision.intermediate_size, vision.out_hidden_size
    merged = width * vision.spatial_merge_size**2
    shapes = text_shapes(config.text) | merger_shapes(vision)
    shapes["visual.patch_embed.proj.bias"] = shapes["visual.merger.ln_q.bias"] = (width,)
    shapes["visual.pos_embed.weight"] = (vision.num_position_embeddings, width)
    for block in range(vision.depth):
        at = f"visual.blocks.{block}."
        shapes[at + "norm1.bias"] = shapes[at + "norm2.bias"] = (width,)
        shapes[at + "mlp.fc1.weight"] = (mlp, width)
        shapes[at + "mlp.fc1.bias"] = (mlp,)
        shapes[at + "mlp.fc2.weight"] = (width, mlp)
        shapes[at + "mlp.fc2.bias"] = (width,)
    for number in range(len(vision.deepstack_visual_indexes)):
        at = f"visual.deepstack_merger_list.{number}."
        shapes[at + "ln_q.weight"] = shapes[at + "ln_q.bias"] = (merged,)
        shapes[at + "mlp.0.weight"] = (merged, merged)
        shapes[at + "mlp.0.bias"] = (merged,)
        shapes[at + "mlp.2.weight"] = (out, merged)
        shapes[at + "mlp.2.bias"] = (out,)
    return shapes


def stored(config: ModelConfig) -> dict[str, Stored]:
    """Canonical name -> the published one."""
    places = {}
    for name, shape in tensor_shapes(config).items():
        if not name.startswith("visual."):
            continue
        for ours, theirs in PUBLISHED:
            if ours in name:
                places[name] = Stored(name.replace(ours, theirs), shape)
    return places
