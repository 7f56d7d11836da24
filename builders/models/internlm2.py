"""internlm2: InternLM2 and InternLM2.5. The llama decoder under other names, with q, k and v fused.

transformers has no such model: names, layout and scaling are those of the published
modeling_internlm2.py. The rows of `attention.wqkv` go by group of heads: the group's q heads, then
its k, then its v.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from builders.config_reader import ConfigReader
from builders.models.generation import read_generation
from builders.models.text import read_text, text_shapes
from builders.stored import Stored
from edgevlm.config import ModelConfig, TextConfig
from edgevlm.errors import UnsupportedCheckpoint

LAYER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def read_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    preprocessor: Mapping[str, Any] | None,
    tokenizer_eos: tuple[int, ...],
) -> ModelConfig:
    """A model that reads text only."""
    root = ConfigReader(config, "config.json")
    return ModelConfig(
        model_type="internlm2",
        text=read_internlm2_text(root),
        generation=read_generation(generation, root, tokenizer_eos),
    )


def read_internlm2_text(root: ConfigReader) -> TextConfig:
    """The decoder, alone or as the `llm_config` of a vision family.

    Dynamic scaling acts beyond max_position_embeddings only, and a bundle never goes there.
    """
    root.require("bias", False, default=True)  # absent means true in the published config class
    plain = dict(root.data)
    if "rope_scaling" in root:
        scaling = root.section("rope_scaling")
        kind = scaling.value("type", scaling.value("rope_type", None))
        if kind == "dynamic":
            del plain["rope_scaling"]
        elif kind not in (None, "default"):
            raise UnsupportedCheckpoint(
                f"{root.where} has rope_scaling type {kind!r}, and only 'dynamic' is supported; "
                "use a checkpoint that has it"
            )
    return read_text(
        ConfigReader(plain, root.where),
        "internlm2",
        attention_bias=False,
        default_theta=10_000.0,
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the family needs, by canonical name."""
    return text_shapes(config.text)


def stored(config: ModelConfig) -> dict[str, Stored]:
    """Canonical name -> where the published files have it."""
    text = config.text
    shapes = text_shapes(text)
    places = {
        "model.embed_tokens.weight": Stored(
            "model.tok_embeddings.weight", shapes["model.embed_tokens.weight"]
        )
    }
    if "lm_head.weight" in shapes:
        places["lm_head.weight"] = Stored("output.weight", shapes["lm_head.weight"])
    groups, size = text.num_key_value_heads, text.head_dim
    of_group = text.num_attention_heads // groups
    total = groups * (of_group + 2) * size
    rows = np.arange(total).reshape(groups, of_group + 2, size)
    parts = {"q": rows[:, :of_group], "k": rows[:, of_group], "v": rows[:, of_group + 1]}
    for layer in range(text.num_hidden_layers):
        at = f"model.layers.{layer}."
        for name, theirs in LAYER.items():
            places[f"{at}{name}.weight"] = Stored(
                f"{at}{theirs}.weight", shapes[f"{at}{name}.weight"]
            )
        for part, taken in parts.items():
            places[f"{at}self_attn.{part}_proj.weight"] = Stored(
                f"{at}attention.wqkv.weight", (total, text.hidden_size), taken.reshape(-1)
            )
    return places
