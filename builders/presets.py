"""Published dimensions of models by name, and whatever else a person calls a model.

A preset is one entry: the fields of its config.json that decide its size, and facts to hold it to.
Weights are never read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builders.models import family_of
from builders.shards import read_json
from edgevlm.config import ModelConfig
from edgevlm.errors import UnsupportedCheckpoint

QWEN2_VL_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 16384 * 28 * 28}  # as both hub files say
QWEN3_VL_IMAGES = {  # as its hub files say
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}


@dataclass(frozen=True)
class Preset:
    """`parameters`: as the hub counts them, a tied head once.

    `tokenizer_bytes`: of tokenizer.json, to 10 KB.
    """

    source: str
    config: Mapping[str, Any]
    parameters: int
    tokenizer_bytes: int
    preprocessor: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class NamedModel:
    """A model's dimensions, by whatever name it was asked for."""

    name: str
    source: str
    config: ModelConfig
    tokenizer_bytes: int = 0
    preset: Preset | None = field(default=None, compare=False)


def _decoder(
    sizes: tuple[int, int, int, int, int], vocab_size: int, context: int, tied: bool
) -> dict[str, Any]:
    """`sizes`: hidden_size, intermediate_size, layers, heads, kv heads."""
    hidden, intermediate, layers, heads, kv_heads = sizes
    return {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
    }


def _qwen2(hub: str, parameters: int, decoder: dict[str, Any]) -> Preset:
    config = {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 151645,
    }
    return Preset(f"huggingface.co/{hub}", config | decoder, parameters, 7_030_000)


def _qwen3(hub: str, parameters: int, decoder: dict[str, Any]) -> Preset:
    config = {
        "model_type": "qwen3",
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 151645,
    }
    return Preset(f"huggingface.co/{hub}", config | decoder, parameters, 11_420_000)


def _qwen2_vl(hub: str, parameters: int, decoder: dict[str, Any]) -> Preset:
    config = {
        "model_type": "qwen2_vl",
        "rope_theta": 1e6,
        "rope_scaling": MROPE,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 151645,
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "num_heads": 16,
            "mlp_ratio": 4,
            "hidden_size": decoder["hidden_size"],
        },
    }
    return Preset(f"huggingface.co/{hub}", config | decoder, parameters, 7_030_000, QWEN2_VL_PIXELS)


def _qwen2_5_vl(hub: str, parameters: int, decoder: dict[str, Any]) -> Preset:
    config = {
        "model_type": "qwen2_5_vl",
        "rope_theta": 1e6,
        "rope_scaling": MROPE,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 151645,
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": decoder["hidden_size"],
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }
    return Preset(f"huggingface.co/{hub}", config | decoder, parameters, 7_030_000, QWEN2_VL_PIXELS)


def _qwen3_vl(
    hub: str, parameters: int, tower: tuple[int, int, int, list[int]], decoder: dict[str, Any]
) -> Preset:
    """`tower`: depth, hidden_size, intermediate_size, deepstack_visual_indexes."""
    depth, width, intermediate, deepstack = tower
    text = {
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]},
        "eos_token_id": 151645,
    }
    config = {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": decoder["tie_word_embeddings"],
        "text_config": text | decoder,
        "vision_config": {
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": intermediate,
            "num_heads": 16,
            "out_hidden_size": decoder["hidden_size"],
            "deepstack_visual_indexes": deepstack,
            "num_position_embeddings": 2304,
        },
    }
    return Preset(f"huggingface.co/{hub}", config, parameters, 11_420_000, QWEN3_VL_IMAGES)


def _smollm2(hub: str, parameters: int, theta: float, decoder: dict[str, Any]) -> Preset:
    config = {"model_type": "llama", "rope_theta": theta, "rms_norm_eps": 1e-5, "eos_token_id": 2}
    return Preset(f"huggingface.co/{hub}", config | decoder, parameters, 2_100_000)


def _llama3_2(hub: str, parameters: int, head_dim: int, decoder: dict[str, Any]) -> Preset:
    config = {
        "model_type": "llama",
        "head_dim": head_dim,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "eos_token_id": [128001, 128008, 128009],
    }
    return Preset(f"huggingface.co/{hub}", config | decoder, parameters, 9_090_000)


PRESETS: dict[str, Preset] = {
    "qwen2-vl-2b": _qwen2_vl(
        "Qwen/Qwen2-VL-2B-Instruct",
        2_208_985_600,
        _decoder((1536, 8960, 28, 12, 2), 151936, 32768, True),
    ),
    "qwen2-vl-7b": _qwen2_vl(
        "Qwen/Qwen2-VL-7B-Instruct",
        8_291_375_616,
        _decoder((3584, 18944, 28, 28, 4), 152064, 32768, False),
    ),
    "qwen2.5-vl-3b": _qwen2_5_vl(
        "Qwen/Qwen2.5-VL-3B-Instruct",
        3_754_622_976,
        _decoder((2048, 11008, 36, 16, 2), 151936, 128000, True),
    ),
    "qwen2.5-vl-7b": _qwen2_5_vl(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        8_292_166_656,
        _decoder((3584, 18944, 28, 28, 4), 152064, 128000, False),
    ),
    "qwen3-vl-2b": _qwen3_vl(
        "Qwen/Qwen3-VL-2B-Instruct",
        2_127_532_032,
        (24, 1024, 4096, [5, 11, 17]),
        _decoder((2048, 6144, 28, 16, 8), 151936, 262144, True),
    ),
    "qwen3-vl-4b": _qwen3_vl(
        "Qwen/Qwen3-VL-4B-Instruct",
        4_437_815_808,
        (24, 1024, 4096, [5, 11, 17]),
        _decoder((2560, 9728, 36, 32, 8), 151936, 262144, True),
    ),
    "qwen3-vl-8b": _qwen3_vl(
        "Qwen/Qwen3-VL-8B-Instruct",
        8_767_123_696,
        (27, 1152, 4304, [8, 16, 24]),
        _decoder((4096, 12288, 36, 32, 8), 151936, 262144, False),
    ),
    "qwen2.5-0.5b": _qwen2(
        "Qwen/Qwen2.5-0.5B-Instruct",
        494_032_768,
        _decoder((896, 4864, 24, 14, 2), 151936, 32768, True),
    ),
    "qwen2.5-1.5b": _qwen2(
        "Qwen/Qwen2.5-1.5B-Instruct",
        1_543_714_304,
        _decoder((1536, 8960, 28, 12, 2), 151936, 32768, True),
    ),
    "qwen2.5-3b": _qwen2(
        "Qwen/Qwen2.5-3B-Instruct",
        3_085_938_688,
        _decoder((2048, 11008, 36, 16, 2), 151936, 32768, True),
    ),
    "qwen2.5-7b": _qwen2(
        "Qwen/Qwen2.5-7B-Instruct",
        7_615_616_512,
        _decoder((3584, 18944, 28, 28, 4), 152064, 32768, False),
    ),
    "qwen3-0.6b": _qwen3(
        "Qwen/Qwen3-0.6B",
        596_049_920,
        _decoder((1024, 3072, 28, 16, 8), 151936, 40960, True),
    ),
    "qwen3-1.7b": _qwen3(
        "Qwen/Qwen3-1.7B",
        1_720_574_976,
        _decoder((2048, 6144, 28, 16, 8), 151936, 40960, True),
    ),
    "qwen3-4b": _qwen3(
        "Qwen/Qwen3-4B",
        4_022_468_096,
        _decoder((2560, 9728, 36, 32, 8), 151936, 40960, True),
    ),
    "qwen3-8b": _qwen3(
        "Qwen/Qwen3-8B",
        8_190_735_360,
        _decoder((4096, 12288, 36, 32, 8), 151936, 40960, False),
    ),
    "smollm2-135m": _smollm2(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        134_515_008,
        1e5,
        _decoder((576, 1536, 30, 9, 3), 49152, 8192, True),
    ),
    "smollm2-360m": _smollm2(
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        361_821_120,
        1e5,
        _decoder((960, 2560, 32, 15, 5), 49152, 8192, True),
    ),
    "smollm2-1.7b": _smollm2(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        1_711_376_384,
        1.3e5,
        _decoder((2048, 8192, 24, 32, 32), 49152, 8192, True),
    ),
    "llama-3.2-1b": _llama3_2(
        "meta-llama/Llama-3.2-1B-Instruct",
        1_235_814_400,
        64,
        _decoder((2048, 8192, 16, 32, 8), 128256, 131072, True),
    ),
    "llama-3.2-3b": _llama3_2(
        "meta-llama/Llama-3.2-3B-Instruct",
        3_212_749_824,
        128,
        _decoder((3072, 8192, 28, 24, 8), 128256, 131072, True),
    ),
}
# Beginnings of names that people will ask for, and whose families have no file yet.
NOT_YET = ("internvl2", "minicpm-v", "smolvlm")


def find_model(name: str) -> NamedModel:
    """A preset, a checkpoint's directory or a config.json. Raises UnsupportedCheckpoint."""
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _from_files(path)
    short = _short(name)
    preset = PRESETS.get(short)
    if preset is not None:
        return _from_preset(short, preset)
    if short.startswith(NOT_YET):
        raise UnsupportedCheckpoint(
            f"{name} is not supported yet: its family has no file in builders/models; "
            f"there are {', '.join(PRESETS)}"
        )
    raise UnsupportedCheckpoint(
        f"{name!r} is neither a preset nor a checkpoint's directory or config.json; "
        f"the presets are {', '.join(PRESETS)}"
    )


def smaller_models(config: ModelConfig) -> list[NamedModel]:
    """The presets of the same family with fewer parameters, the largest first."""
    own = parameters(config)
    models = [_from_preset(name, preset) for name, preset in PRESETS.items()]
    same = [m for m in models if m.config.model_type == config.model_type]
    smaller = [m for m in same if parameters(m.config) < own]
    return sorted(smaller, key=lambda m: -parameters(m.config))


def parameters(config: ModelConfig) -> int:
    """Weights of a checkpoint of these dimensions; a tied head is no weight of its own."""
    total = 0
    for shape in family_of({"model_type": config.model_type}).tensor_shapes(config).values():
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def _short(name: str) -> str:
    """ "Qwen/Qwen2-VL-2B-Instruct" is asked for as often as "qwen2-vl-2b"."""
    short = name.rpartition("/")[2].lower().replace("_", "-")
    return short.removesuffix("-instruct")


def _from_preset(name: str, preset: Preset) -> NamedModel:
    family = family_of(preset.config)
    config = family.read_config(preset.config, {}, preset.preprocessor, ())
    return NamedModel(name, preset.source, config, preset.tokenizer_bytes, preset)


def _from_files(path: Path) -> NamedModel:
    """Only the JSON files are needed, so a directory without weights will do."""
    directory = path if path.is_dir() else path.parent
    config_file = path / "config.json" if path.is_dir() else path
    if not config_file.is_file():
        raise UnsupportedCheckpoint(f"{config_file} does not exist; give a checkpoint's directory")
    raw = read_json(config_file)
    config = family_of(raw).read_config(
        raw,
        _optional(directory / "generation_config.json") or {},
        _optional(directory / "preprocessor_config.json")
        or _optional(directory / "processor_config.json"),
        (),
    )
    tokenizer = directory / "tokenizer.json"
    size = tokenizer.stat().st_size if tokenizer.is_file() else 0
    return NamedModel(str(path), str(config_file), config, size)


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None
