"""qwen3: the llama decoder with an RMSNorm over each head of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from builders.config_reader import ConfigReader
from builders.models.generation import read_generation
from builders.models.text import read_text, text_shapes
from edgevlm.config import ModelConfig

HEAD_DIM = 128  # transformers' default; it is not hidden_size / num_attention_heads


def read_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    preprocessor: Mapping[str, Any] | None,
    tokenizer_eos: tuple[int, ...],
) -> ModelConfig:
    """Refuses attention_bias, which would put one on o_proj too."""
    root = ConfigReader(config, "config.json")
    root.require("attention_bias", False, default=False)
    text = read_text(
        root,
        "qwen3",
        attention_bias=False,
        default_theta=10_000.0,
        qk_norm=True,
        default_head_dim=HEAD_DIM,
    )
    return ModelConfig(
        model_type="qwen3",
        text=text,
        generation=read_generation(generation, root, tokenizer_eos),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the family needs, by canonical name."""
    return text_shapes(config.text)
