"""One file per family, named after Hugging Face's model_type; `FAMILIES` lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from builders.models import internlm2, llama, qwen2, qwen2_5_vl, qwen2_vl, qwen3, qwen3_vl
from builders.stored import Stored
from edgevlm.config import ModelConfig
from edgevlm.errors import UnsupportedCheckpoint

# (config.json, generation_config.json, preprocessor_config.json or None, the tokenizer's eos ids)
ReadConfig = Callable[
    [Mapping[str, Any], Mapping[str, Any], Mapping[str, Any] | None, tuple[int, ...]], ModelConfig
]


@dataclass(frozen=True)
class Family:
    """What the builders know about one model_type.

    `stored`: canonical name -> where the files have it, of the tensors they have elsewhere.
    """

    model_type: str
    read_config: ReadConfig
    tensor_shapes: Callable[[ModelConfig], dict[str, tuple[int, ...]]]
    stored: Callable[[ModelConfig], dict[str, Stored]] = field(default=lambda config: {})


FAMILIES: dict[str, Family] = {
    "internlm2": Family(
        "internlm2", internlm2.read_config, internlm2.tensor_shapes, internlm2.stored
    ),
    "llama": Family("llama", llama.read_config, llama.tensor_shapes),
    "qwen2": Family("qwen2", qwen2.read_config, qwen2.tensor_shapes),
    "qwen2_vl": Family("qwen2_vl", qwen2_vl.read_config, qwen2_vl.tensor_shapes),
    "qwen2_5_vl": Family("qwen2_5_vl", qwen2_5_vl.read_config, qwen2_5_vl.tensor_shapes),
    "qwen3": Family("qwen3", qwen3.read_config, qwen3.tensor_shapes),
    "qwen3_vl": Family("qwen3_vl", qwen3_vl.read_config, qwen3_vl.tensor_shapes, qwen3_vl.stored),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json; an unknown model_type is refused with the known ones."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedCheckpoint(
            f"config.json has model_type {model_type!r}, which is not supported; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    return family
