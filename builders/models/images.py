"""What the Qwen vision families share: the image processor, the image tokens, the patch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from builders.config_reader import ConfigReader
from edgevlm.config import ImageProcessorConfig, ImageTokens, TextConfig, VisionConfig
from edgevlm.errors import UnsupportedCheckpoint

# transformers' defaults of Qwen2VLImageProcessor; all the families use that class
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3


def read_image_processor(
    preprocessor: Mapping[str, Any] | None, vision: VisionConfig
) -> ImageProcessorConfig:
    """From preprocessor_config.json, or processor_config.json (transformers 5), or the defaults."""
    reader = ConfigReader(preprocessor or {}, "preprocessor_config.json")
    if "image_processor" in reader:
        reader = reader.section("image_processor")
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        reader.require(step, True, default=True)
    reader.require("resample", BICUBIC, default=BICUBIC)
    sizes = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    for key, expected in sizes.items():
        reader.require(key, expected, default=expected)
    min_pixels, max_pixels = _pixel_limits(reader)
    mean, std = reader.floats("image_mean", CLIP_MEAN), reader.floats("image_std", CLIP_STD)
    if len(mean) != vision.in_channels or len(std) != vision.in_channels or 0.0 in std:
        raise reader.mistyped(
            "image_mean and image_std", (mean, std), f"{vision.in_channels} non-zero numbers each"
        )
    return ImageProcessorConfig(
        scheme="smart_resize",
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        image_mean=mean,
        image_std=std,
        rescale_factor=reader.float("rescale_factor", 1 / 255),
    )


def _pixel_limits(reader: ConfigReader) -> tuple[int, int]:
    """`min_pixels`, `max_pixels` win over `size`, as in transformers."""
    low, high = MIN_PIXELS, MAX_PIXELS
    if "size" in reader:
        size = reader.section("size")
        # hub files of early 2025 write min_pixels and max_pixels inside size
        low = size.int("shortest_edge", size.int("min_pixels", low))
        high = size.int("longest_edge", size.int("max_pixels", high))
    low, high = reader.int("min_pixels", low), reader.int("max_pixels", high)
    if low > high:
        raise reader.mistyped("min_pixels", low, f"at most max_pixels {high}")
    return low, high


def read_image_tokens(root: ConfigReader, text: TextConfig) -> ImageTokens:
    """Ids at the root of config.json; the defaults are those of the published checkpoints."""
    published = {
        "image_token_id": 151655,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    }
    ids = {key: root.int(key, default, minimum=0) for key, default in published.items()}
    for key, token in ids.items():
        if token >= text.vocab_size:
            raise root.mistyped(key, token, f"below vocab_size {text.vocab_size}")
    return ImageTokens(*ids.values())


class VisionSizes(TypedDict):
    """The fields of VisionConfig that the families write alike."""

    depth: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int


def read_vision_sizes(vision: ConfigReader, patch_size: int = 14) -> VisionSizes:
    """Depth, heads and patch sizes, with transformers' defaults (`patch_size` is the family's)."""
    # hub files say in_chans, which transformers ignores in favour of its own in_channels
    channels = vision.int("in_channels", vision.int("in_chans", 3))
    if channels != 3:
        vision.require("in_channels" if "in_channels" in vision else "in_chans", 3)
    return {
        "depth": vision.int("depth"),
        "num_heads": vision.int("num_heads"),
        "in_channels": channels,
        "patch_size": vision.int("patch_size", patch_size),
        "temporal_patch_size": vision.int("temporal_patch_size", 2),
        "spatial_merge_size": vision.int("spatial_merge_size", 2),
    }


def check_vision(reader: ConfigReader, vision: VisionConfig, text: TextConfig) -> None:
    """The tower's width divides into heads of rotary pairs, and its output fits the decoder."""
    if vision.hidden_size % (vision.num_heads * 4):
        raise UnsupportedCheckpoint(
            f"{reader.where} has width {vision.hidden_size} and num_heads {vision.num_heads}; "
            "a head's width must be a multiple of 4, correct the file"
        )
    if vision.out_hidden_size != text.hidden_size:
        raise UnsupportedCheckpoint(
            f"{reader.where} has an output width of {vision.out_hidden_size}, and the decoder's "
            f"hidden_size is {text.hidden_size}; they must be equal, correct the file"
        )


def merger_shapes(vision: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Patch embedding, attention and merger: the tensors that the families all have."""
    width, out = vision.hidden_size, vision.out_hidden_size
    merged = width * vision.spatial_merge_size**2
    patch = (vision.patch_size, vision.patch_size)
    shapes: dict[str, tuple[int, ...]] = {
        "visual.patch_embed.proj.weight": (
            width,
            vision.in_channels,
            vision.temporal_patch_size,
            *patch,
        ),
        "visual.merger.ln_q.weight": (width,),
        "visual.merger.mlp.0.weight": (merged, merged),
        "visual.merger.mlp.0.bias": (merged,),
        "visual.merger.mlp.2.weight": (out, merged),
        "visual.merger.mlp.2.bias": (out,),
    }
    for block in range(vision.depth):
        at = f"visual.blocks.{block}."
        shapes[at + "norm1.weight"] = shapes[at + "norm2.weight"] = (width,)
        shapes[at + "attn.qkv.weight"] = (3 * width, width)
        shapes[at + "attn.qkv.bias"] = (3 * width,)
        shapes[at + "attn.proj.weight"] = (width, width)
        shapes[at + "attn.proj.bias"] = (width,)
    return shapes
