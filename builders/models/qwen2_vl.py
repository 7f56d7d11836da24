"""qwen2_vl: the qwen2 decoder with M-RoPE, and a tower of LayerNorm and quick_gelu blocks."""

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
    text = read_text(root, "qwen2_vl", attention_bias=True, default_theta=1_000_000.0)
    require_mrope(root, text)
    vision = _read_vision(root.section("vision_config"), text)
    return ModelConfig(
        model_type="qwen2_vl",
        text=text,
        generation=read_generation(generation, root, tokenizer_eos),
        vision=vision,
        image_processor=read_image_processor(preprocessor, vision),
        image_tokens=read_image_tokens(root, text),
    )


def _read_vision(reader: ConfigReader, text: TextConfig) -> VisionConfig:
    """Here `embed_dim` is the tower's width and `hidden_size` the decoder's."""
    reader.require("hidden_act", "quick_gelu", default="quick_gelu")
    width = reader.int("embed_dim")
    vision = VisionConfig(
        model_type="qwen2_vl",
        hidden_size=width,
        intermediate_size=int(width * reader.float("mlp_ratio", 4.0)),
        out_hidden_size=reader.int("hidden_size"),
        hidden_act="quick_gelu",
        **read_vision_sizes(reader),
    )
    check_vision(reader, vision, text)
    return vision


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the family needs, by canonical name."""
    vision = config.vision
    assert vision is not None
    width, mlp = vision.hidden_size, vision.intermediate_size
    shapes = text_shapes(config.text) | merger_shapes(vision)
    shapes["visual.merger.ln_q.bias"] = (width,)
    for block in range(vision.depth):
        at = f"visual.blocks.{block}."
        shapes[at + "norm1.bias"] = shapes[at + "norm2.bias"] = (width,)
        shapes[at + "mlp.fc1.weight"] = (mlp, width)
        shapes[at + "mlp.fc1.bias"] = (mlp,)
        shapes[at + "mlp.fc2.weight"] = (width, mlp)
        shapes[at + "mlp.fc2.bias"] = (width,)
    return shapes
