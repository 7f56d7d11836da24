"""A picture from outside (path, bytes, PIL image, array) becomes an RGB PIL image.

Knows file formats, EXIF, alpha and size limits; knows nothing about models. The header is read
first, so that tokens can be counted and a decompression bomb refused before one pixel is decoded.
"""

import base64
import binascii
import contextlib
import functools
import hashlib
import io
import os
import stat
import struct
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from edgevlm.errors import BadImage, BadParameter

ImageSource: TypeAlias = "str | Path | bytes | Image.Image | NDArray[np.uint8]"

# Pillow holds 4 bytes per pixel and a rotated or composited picture exists twice for a moment: 512
# MiB at worst.
MAX_DECODED_PIXELS = 64 * 1024 * 1024

# An allow-list: other Pillow plugins start programs (EPS) or are rarely exercised parsers.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")

_ORIENTATION_TAG = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BAND_ROWS = 256


@dataclass(frozen=True, eq=False)
class OpenImage:
    """A picture of which only the header was read. `size` is (width, height) after EXIF rotation.

    It holds no file handle: a path is opened again by `decode`.
    """

    source: "ImageSource"
    name: str
    size: tuple[int, int]
    orientation: int
    max_decoded_pixels: int


def open_image(source: "ImageSource", *, max_decoded_pixels: int = MAX_DECODED_PIXELS) -> OpenImage:
    """Read a picture's header. Raises BadImage for what is no picture or has too many pixels."""
    name = _name(source)
    with _quiet(), _opened(source, name) as (image, _):
        _check_pixels(image.size, name, max_decoded_pixels)
        orientation = _orientation(image)
        width, height = image.size
    size = (height, width) if orientation >= 5 else (width, height)
    return OpenImage(source, name, size, orientation, max_decoded_pixels)


def decode(image: "OpenImage | ImageSource") -> Image.Image:
    """The first frame as RGB: turned as EXIF says, composited on white, scaled to 8 bits."""
    opened = image if isinstance(image, OpenImage) else open_image(image)
    with _quiet(), _opened(opened.source, opened.name) as (picture, ours):
        _check_pixels(picture.size, opened.name, opened.max_decoded_pixels)
        try:
            picture.load()
            rgb = _to_rgb(picture)
        except Exception as error:  # a damaged file makes the decoders raise nearly anything
            raise BadImage(f"{opened.name} cannot be decoded: {_reason(error)}") from None
        if opened.orientation in _TRANSPOSE:
            rgb = rgb.transpose(_TRANSPOSE[opened.orientation])
        elif rgb is picture and not ours:
            rgb = picture.copy()  # the caller may change or close its own image
    if rgb.size != opened.size:
        raise BadImage(
            f"{opened.name} is {_wxh(rgb.size)} pixels where its header said {_wxh(opened.size)}"
        )
    return rgb


def image_digest(image: Image.Image) -> bytes:
    """16 bytes that name an RGB picture: blake2b of its size and pixels."""
    digest = hashlib.blake2b(struct.pack("<II", *image.size), digest_size=16)
    for top in range(0, image.height, _BAND_ROWS):
        band = (0, top, image.width, min(top + _BAND_ROWS, image.height))
        digest.update(image.crop(band).tobytes())
    return digest.digest()


def decode_data_url(url: str) -> bytes:
    """The bytes of a `data:...;base64,` URL; white space and padding are mended, no more."""
    head, comma, payload = url.partition(",")
    if head[:5].lower() != "data:":
        raise BadParameter(
            f"image_url {url[:40]!r} is not a data URL: expected data:image/...;base64,..."
        )
    if not comma or not head.lower().replace(" ", "").endswith(";base64"):
        raise BadParameter(f"data URL {head[:60]!r} has no ';base64,' before its data")
    payload = "".join(payload.split())
    if not payload:
        raise BadParameter("data URL holds no data after ';base64,'")
    try:
        return base64.b64decode(payload + "=" * (-len(payload) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadParameter(f"data URL is not valid base64: {error}") from None


_quiet_lock = threading.Lock()
_quiet_depth = 0
_quiet_filters = contextlib.ExitStack()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Pillow's warnings; counted, because `catch_warnings` alone is not safe in threads."""
    global _quiet_depth
    with _quiet_lock:
        if _quiet_depth == 0:
            _quiet_filters.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        _quiet_depth += 1
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_depth -= 1
            if _quiet_depth == 0:
                _quiet_filters.close()


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(f for f in FORMATS if f in Image.OPEN)


@contextlib.contextmanager
def _opened(source: Any, name: str) -> Iterator[tuple[Image.Image, bool]]:
    """The source as a PIL image, its pixels maybe not loaded yet, and whether it is ours."""
    if isinstance(source, Image.Image):
        yield source, False
        return
    if isinstance(source, np.ndarray):
        yield _from_array(source), True
        return
    stream = io.BytesIO(source) if isinstance(source, bytes) else _file(source, name)
    with stream:
        try:
            image = Image.open(stream, formats=_formats())
        except Image.DecompressionBombError:
            raise BadImage(
                f"{name} has over {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels; "
                f"the limit is {MAX_DECODED_PIXELS:,}: send it smaller"
            ) from None
        except Exception as error:  # as in `decode`
            raise BadImage(f"{name} is not a picture: {_reason(error)}") from None
        with image:
            yield image, True


def _file(path: Any, name: str) -> BinaryIO:
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise BadImage(f"{name} is a directory, not a picture")
        if not stat.S_ISREG(kind):  # a pipe would block, a device never end
            raise BadImage(f"{name} is not a regular file")
        return open(path, "rb")
    except FileNotFoundError:
        raise BadImage(f"{name} does not exist") from None
    except (OSError, ValueError) as error:
        raise BadImage(f"{name} cannot be read: {_reason(error)}") from None


def _from_array(array: NDArray[Any]) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise BadImage(
            f"image array has shape {array.shape} and dtype {array.dtype}; "
            "expected [height, width, 3] uint8"
        )
    return Image.fromarray(np.ascontiguousarray(array))


def _name(source: Any) -> str:
    if isinstance(source, str | Path):
        return f"image {str(source)[:200]!r}"
    if isinstance(source, bytes):
        if not source:
            raise BadImage("image is empty (0 bytes)")
        return f"image ({len(source):,} bytes)"
    if isinstance(source, Image.Image | np.ndarray):
        return f"image ({type(source).__name__})"
    raise BadImage(
        f"image is {type(source).__name__}; expected a path, bytes, a PIL image or a uint8 array"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"no format of {', '.join(FORMATS)} matches, or its header is damaged"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if isinstance(error, MemoryError):
        return "not enough memory"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _wxh(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _check_pixels(size: tuple[int, int], name: str, limit: int) -> None:
    pixels = size[0] * size[1]
    if pixels == 0:
        raise BadImage(f"{name} is {_wxh(size)}: it has no pixels")
    if pixels > limit:
        raise BadImage(
            f"{name} is {_wxh(size)} = {pixels:,} pixels; the limit is {limit:,}: send it smaller"
        )


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1-8; 1 where EXIF is absent or corrupt. Decodes no pixel."""
    if image.format == "TIFF":
        return 1  # Pillow turns a TIFF itself, and says the turned size
    try:
        if image.format == "PNG" and "exif" not in image.info and hasattr(image, "fp"):
            if late := _late_png_exif(image.fp):
                image.info["exif"] = b"Exif\0\0" + late
        # The base class's method: PNG's own one would decode the whole picture first.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG)
    except Exception:  # corrupt EXIF is no reason to refuse a picture
        return 1
    return value if isinstance(value, int) and value in _TRANSPOSE else 1


def _late_png_exif(stream: Any) -> bytes | None:
    """The eXIf chunk that some writers put after a PNG's pixels, found from chunk headers."""
    if stream is None:
        return None
    place = stream.tell()
    try:
        stream.seek(8)
        while len(head := stream.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind == b"eXIf" and length < 1 << 20:
                return bytes(stream.read(length))
            stream.seek(length + 4, os.SEEK_CUR)
        return None
    finally:
        stream.seek(place)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _scaled_to_8_bits(image).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _scaled_to_8_bits(image: Image.Image) -> Image.Image:
    """Modes I;16, I and F as mode L. The brightest value tells the range that I and F use."""
    if image.mode.startswith("I;16"):
        scale = 255 / 65535
    else:
        high: Any = image.getextrema()[1]
        top = float(high) if np.isfinite(high) else 65535.0
        ranges = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        scale = 255 / next((r for r in ranges if top <= r), top)
    grey = np.empty((image.height, image.width), np.uint8)
    for y in range(0, image.height, _BAND_ROWS):
        rows = slice(y, min(y + _BAND_ROWS, image.height))
        band = np.asarray(image.crop((0, rows.start, image.width, rows.stop)), np.float32) * scale
        np.nan_to_num(band, copy=False, nan=0.0, posinf=255.0, neginf=0.0)
        grey[rows] = np.rint(np.clip(band, 0, 255))
    return Image.fromarray(grey)
