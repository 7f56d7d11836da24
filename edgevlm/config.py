"""What a bundle knows about its model, as frozen data. Names are Hugging Face's.

Nothing here reads a checkpoint (builders do) or a file (bundle does).
"""

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

PositionScheme = Literal["plain", "mrope", "mrope_interleaved"]
ImageScheme = Literal["smart_resize"]
HiddenAct = Literal["silu", "quick_gelu", "gelu", "gelu_pytorch_tanh"]


@dataclass(frozen=True)
class Llama3RopeScaling:
    """`rope_type: llama3`: low frequencies are divided by `factor`, middle ones blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the text model; `mrope_section` is set where the scheme is not plain."""

    theta: float
    scheme: PositionScheme = "plain"
    mrope_section: tuple[int, ...] | None = None  # (t, h, w), sums to head_dim / 2
    scaling: Llama3RopeScaling | None = None


@dataclass(frozen=True)
class TextConfig:
    """The decoder.

    `attention_bias`: q, k and v carry a bias (Qwen2). `qk_norm`: an RMSNorm over each head of q
    and k before they are rotated (Qwen3). `deepstack`: after each of so many first layers, features
    of the tower are added to the hidden states of image rows (Qwen3-VL).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    max_position_embeddings: int
    qk_norm: bool = False
    deepstack: int = 0


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower. `window_size` (pixels): None where every layer sees the whole image.

    `num_position_embeddings`: a square table of learned positions, interpolated to each picture's
    grid; None where there is none. `deepstack_visual_indexes`: blocks whose output goes to the
    decoder too, as `deepstack_features.N`.
    """

    model_type: str
    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    hidden_act: HiddenAct
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    window_size: int | None = None
    fullatt_block_indexes: tuple[int, ...] = ()
    num_position_embeddings: int | None = None
    deepstack_visual_indexes: tuple[int, ...] = ()

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Values in one row of `pixel_values`: channels x frames x patch x patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class ImageProcessorConfig:
    """How a picture becomes `pixel_values`; the fields of preprocessor_config.json."""

    scheme: ImageScheme
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    rescale_factor: float = 1 / 255


@dataclass(frozen=True)
class ImageTokens:
    """Ids that frame an image in the prompt. `image` stands once per image feature."""

    image: int
    vision_start: int
    vision_end: int


@dataclass(frozen=True)
class GenerationDefaults:
    """generation_config.json: used where a request says nothing. None: not given there."""

    eos_token_ids: tuple[int, ...]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Everything a bundle knows about its model. The last three are None for a text model."""

    model_type: str
    text: TextConfig
    generation: GenerationDefaults
    vision: VisionConfig | None = None
    image_processor: ImageProcessorConfig | None = None
    image_tokens: ImageTokens | None = None


@dataclass(frozen=True)
class Limits:
    """What a bundle was built for; a request beyond it is refused. `max_pixels` is per image."""

    max_seq_len: int
    max_prefill_chunk: int
    slots: int
    max_images: int = 0
    max_pixels: int = 0


T = TypeVar("T")


def to_dict(value: Any) -> Any:
    """A dataclass as JSON types (tuples become lists)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [to_dict(v) for v in value]
    if isinstance(value, dict):
        return {k: to_dict(v) for k, v in value.items()}
    return value


def from_dict(cls: type[T], data: Any) -> T:
    """The inverse of `to_dict`. Raises ValueError on an unknown, missing or mistyped field."""
    return typing.cast(T, _parse(cls, data, cls.__name__))


def _parse(kind: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise ValueError(f"{where} is {type(data).__name__}, not an object")
        hints = typing.get_type_hints(kind)
        if unknown := sorted(set(data) - set(hints)):
            raise ValueError(f"{where} has unknown field {unknown[0]!r}")
        values = {k: _parse(hints[k], v, f"{where}.{k}") for k, v in data.items()}
        try:
            return typing.cast(Any, kind)(**values)
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from None
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        choices = [a for a in args if a is not type(None)]
        exact = [a for a in choices if type(data) is a]
        return _parse((exact or choices)[0], data, where)
    if origin is Literal:
        if data not in args:
            raise ValueError(f"{where} is {data!r}, not one of {', '.join(map(repr, args))}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{where} is {type(data).__name__}, not a list")
        kinds = args[:1] * len(data) if args[1:] == (...,) else args
        if len(kinds) != len(data):
            raise ValueError(f"{where} has {len(data)} items, not {len(kinds)}")
        pairs = enumerate(zip(kinds, data, strict=True))
        return tuple(_parse(k, v, f"{where}[{i}]") for i, (k, v) in pairs)
    if origin is dict:
        if not isinstance(data, dict):
            raise ValueError(f"{where} is {type(data).__name__}, not an object")
        return {k: _parse(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if kind is float and type(data) is int:
        return float(data)
    if kind is not Any and (not isinstance(data, kind) or isinstance(data, bool) and kind is int):
        raise ValueError(f"{where} is {data!r}, not {kind.__name__}")
    return data
