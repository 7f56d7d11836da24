"""qwen2: Qwen2 and Qwen2.5. The llama decoder with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from builders.config_reader import ConfigReader
from builders.models.generation import read_generation
from builders.models.text import read_text, text_shapes
from edgevlm.config import ModelConfig


def read_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    preprocessor: Mapping[str, Any] | None,
    tokenizer_eos: tuple[int, ...],
) -> ModelConfig:
    """The biases are the family's, not a field of its config."""
    root = ConfigReader(config, "config.json")
    return ModelConfig(
        model_type="qwen2",
        text=read_text(root, "qwen2", attention_bias=True, default_theta=10_000.0),
        generation=read_generation(generation, root, tokenizer_eos),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the family needs, by canonical name."""
    return text_shapes(config.text)
