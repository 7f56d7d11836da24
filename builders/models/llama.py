"""llama: Llama 2 and 3, SmolLM2. No biases; rope plain or llama3."""

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
    """Refuses biases: Hugging Face's llama would put one on o_proj too, which no block has."""
    root = ConfigReader(config, "config.json")
    root.require("attention_bias", False, default=False)
    root.require("mlp_bias", False, default=False)
    return ModelConfig(
        model_type="llama",
        text=read_text(root, "llama", attention_bias=False, default_theta=10_000.0),
        generation=read_generation(generation, root, tokenizer_eos),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the family needs, by canonical name."""
    return text_shapes(config.text)
