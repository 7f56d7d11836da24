"""An RGB picture becomes `pixel_values` by the scheme "smart_resize", bit-equal to transformers.

Knows resizing, normalising and patch order; knows nothing about files, prompts or devices. Peak
memory besides the decoded picture and `out`: the resized picture (4 bytes per pixel), Pillow's
half-resized one (4 bytes x new width x old height) while it resizes, and one band of `merge_size *
patch_size` rows.
"""

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgevlm.config import ImageProcessorConfig
from edgevlm.errors import BadImage

MAX_ASPECT_RATIO = 200
NO_LIMIT = 1 << 62  # pixels
Grid = tuple[int, int, int]  # (t, h, w) in patches


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width): multiples of `factor`, area within the limits (transformers' function)."""
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise BadImage(
            f"image is {width}x{height}: a side is over {MAX_ASPECT_RATIO} times the other; crop it"
        )
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def resized_size(config: ImageProcessorConfig, size: tuple[int, int]) -> tuple[int, int]:
    """(width, height) that a picture of `size` (width, height) is resized to."""
    factor = config.patch_size * config.merge_size
    height, width = smart_resize(size[1], size[0], factor, config.min_pixels, config.max_pixels)
    return width, height


def unscaled_size(config: ImageProcessorConfig, size: tuple[int, int]) -> tuple[int, int]:
    """The same if no picture were too large; they differ where one is scaled down to the limit."""
    factor = config.patch_size * config.merge_size
    height, width = smart_resize(size[1], size[0], factor, config.min_pixels, NO_LIMIT)
    return width, height


def image_grid(config: ImageProcessorConfig, size: tuple[int, int]) -> Grid:
    """(t, h, w) in patches of a picture of `size` (width, height)."""
    width, height = resized_size(config, size)
    return 1, height // config.patch_size, width // config.patch_size


def image_tokens(config: ImageProcessorConfig, size: tuple[int, int]) -> int:
    """Rows that a picture of `size` (width, height) takes in the prompt."""
    t, h, w = image_grid(config, size)
    return t * h * w // config.merge_size**2


def max_patches(config: ImageProcessorConfig) -> int:
    """Upper bound of patches of any picture; thin ones may pass a small `max_pixels`.

    In units of `factor` pixels: shrinking gives at most max_pixels, or one row of sqrt(200
    max_pixels); growing rounds both sides x and min_pixels / x up.
    """
    factor = config.patch_size * config.merge_size
    units = config.max_pixels // factor**2
    if config.max_pixels < MAX_ASPECT_RATIO * factor**2:
        units = max(units, int(math.sqrt(MAX_ASPECT_RATIO * config.max_pixels) / factor), 1)
    shortest = math.sqrt(config.min_pixels) / factor
    longest = math.ceil(shortest * math.sqrt(MAX_ASPECT_RATIO))
    for side in range(max(1, math.ceil(shortest)), longest + 1):
        below = max(side - 1, shortest) * factor**2  # the shortest side that rounds up to `side`
        units = max(units, side * math.ceil(config.min_pixels / below))
    return units * config.merge_size**2


def resize_image(image: Image.Image, config: ImageProcessorConfig) -> Image.Image:
    """The one resize: Pillow's antialiased bicubic."""
    size = resized_size(config, image.size)
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def pixel_values(
    image: Image.Image, config: ImageProcessorConfig, out: NDArray[Any] | None = None
) -> tuple[NDArray[Any], Grid]:
    """Patches of an RGB picture: [num_patches, patch_dim] float32 (or as `out`), and its grid."""
    return patchify(resize_image(image, config), config, out)


def patchify(
    resized: Image.Image, config: ImageProcessorConfig, out: NDArray[Any] | None = None
) -> tuple[NDArray[Any], Grid]:
    """Patches of an already resized RGB picture in merged-block order, written into `out` if given.

    | axis of out | holds                                                                      |
    |-------------|----------------------------------------------------------------------------|
    | num_patches | block row, block column, row in block, column in block                      |
    | patch_dim   | channel, frame (temporal_patch_size copies), row in patch, column in patch |
    """
    patch, merge, frames = config.patch_size, config.merge_size, config.temporal_patch_size
    h, w = resized.height // patch, resized.width // patch
    shape = (h * w, 3 * frames * patch * patch)
    values: NDArray[Any] = np.empty(shape, np.float32) if out is None else out
    if values.shape != shape or not values.flags.c_contiguous:
        raise ValueError(f"out is {values.shape}; expected C-contiguous {shape}")
    table = _normalised(config.rescale_factor, config.image_mean, config.image_std)
    blocks = values.reshape(h // merge, w // merge, merge, merge, 3, frames, patch, patch)
    band_height = merge * patch
    for row in range(h // merge):
        box = (0, row * band_height, resized.width, (row + 1) * band_height)
        band = np.asarray(resized.crop(box)).reshape(merge, patch, w // merge, merge, patch, 3)
        for channel in range(3):
            # [row, y, block, column, x] -> [block, row, column, y, x], 1 byte per value, then the
            # table
            picked = band[..., channel].transpose(2, 0, 3, 1, 4)
            blocks[row, :, :, :, channel] = table[channel].take(picked)[:, :, :, None]
    return values, (1, h, w)


@functools.lru_cache(maxsize=4)
def _normalised(
    rescale_factor: float, mean: tuple[float, ...], std: tuple[float, ...]
) -> NDArray[np.float32]:
    """[3, 256] float32: (value * rescale_factor - mean) / std, rounded as transformers rounds."""
    scaled = (np.arange(256, dtype=np.float64) * rescale_factor).astype(np.float32)
    means, stds = np.array(mean, np.float32)[:, None], np.array(std, np.float32)[:, None]
    return (scaled - means) / stds
