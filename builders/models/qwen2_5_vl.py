"""qwen2_5_vl: the qwen2 decoder with M-RoPE, and a tower of RMSNorm, gated SiLU and windows."""

from __future__ import annotations

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
from builders.models.text import read_text, require_mrope, text_shapes
from edgevlm.config import ModelConfig, TextConfig, VisionConfig


def read_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    preprocessor: Mapping[str, Any] | None,
    tokenizer_eos: tuple[int, ...],
) -> ModelConfig:
    """Both layouts, the hub's flat one and transformers 5's nested one."""
    root = ConfigReader(config, "config.json")
    text = read_text(root, "qwen2_5_vl", attention_bias=True, default_theta=1_000_000.0)
    require_mrope(root, text)
    vision = _read_vision(root.section("vision_config"), text)
    return ModelConfig(
        model_type="qwen2_5_vl",
        text=text,
        generation=read_generation(generation, root, tokenizer_eos),
        vision=vision,
        image_processor=read_image_processor(preprocessor, vision),
        image_tokens=read_image_tokens(root, text),
    )


def _read_vision(reader: ConfigReader, text: TextConfig) -> VisionConfig:
    """A window holds whole groups of merged patches; the listed blocks attend to everything."""
    reader.require("hidden_act", "silu", default="silu")
    sizes = read_vision_sizes(reader)
    window = reader.int("window_size", 112)
    if window % (sizes["patch_size"] * sizes["spatial_merge_size"]):
        raise reader.mistyped(
            "window_size", window, "a multiple of patch_size x spatial_merge_size"
        )
    full = reader.ints("fullatt_block_indexes", (7, 15, 23, 31))
    if any(block >= sizes["depth"] for block in full):
        raise reader.mistyped(
            "fullatt_block_indexes", list(full), f"all below depth {sizes['depth']}"
        )
    vision = VisionConfig(
        model_type="qwen2_5_vl",
        hidden_size=reader.int("hidden_size"),
        intermediate_size=reader.int("intermediate_size"),
        out_hidden_size=reader.int("out_hidden_size"),
        hidden_act="silu",
        window_size=window,
        fullatt_block_indexes=tuple(sorted(set(full))),
        **sizes,
    )
    check_vision(reader, vision, text)
    return vision


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the family needs, by canonical name."""
    vision = config.vision
    assert vision is not None
    width, mlp = vision.hidden_size, vision.intermediate_size
    shapes = text_shapes(config.text) | merger_shapes(vision)
    for block in range(vision.depth):
        at = f"visual.blocks.{block}.mlp."
        shapes[at + "gate_proj.weight"] = shapes[at + "up_proj.weight"] = (mlp, width)
        shapes[at + "gate_proj.bias"] = shapes[at + "up_proj.bias"] = (mlp,)
        shapes[at + "down_proj.weight"] = (width, mlp)
        shapes[at + "down_proj.bias"] = (width,)
    return shapes
