"""Any picture becomes the right RGB picture, and what is none becomes one clear BadImage."""

import base64
import io
import os
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from edgevlm.errors import BadImage, BadParameter
from edgevlm.images import decode, decode_data_url, image_digest, open_image


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[0x0112] = orientation
    return block


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_and_counted(kind: str, orientation: int) -> None:
    data = encoded(Image.fromarray(noise(24, 16)), kind, exif=exif(orientation))
    with Image.open(io.BytesIO(data)) as reference:
        expected = np.asarray(ImageOps.exif_transpose(reference).convert("RGB"))
    opened = open_image(data)
    assert opened.size == ((16, 24) if orientation >= 5 else (24, 16))
    assert np.array_equal(np.asarray(decode(opened)), expected)


def test_a_png_may_say_its_orientation_after_its_pixels() -> None:
    data = encoded(Image.fromarray(noise(24, 16)), exif=exif(6))
    at = data.index(b"eXIf") - 4
    length = int.from_bytes(data[at : at + 4], "big") + 12
    end = data.index(b"IEND") - 4
    late = data[:at] + data[at + length : end] + data[at : at + length] + data[end:]
    assert open_image(late).size == (16, 24) == decode(late).size


@pytest.mark.parametrize(
    "block", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0"]
)
def test_corrupt_exif_is_ignored(block: bytes) -> None:
    data = encoded(Image.fromarray(noise(24, 16)), "JPEG", exif=block)
    assert decode(data).size == (24, 16)


@pytest.mark.parametrize("value", [0, 9, 77])
def test_an_orientation_that_does_not_exist_is_ignored(value: int) -> None:
    assert decode(encoded(Image.new("RGB", (24, 16)), exif=exif(value))).size == (24, 16)


def test_transparency_becomes_white() -> None:
    for mode, clear in [("RGBA", (0, 0, 0, 0)), ("LA", (0, 0))]:
        pixel = decode(encoded(Image.new(mode, (3, 2), clear))).getpixel((0, 0))
        assert pixel == (255, 255, 255)
    palette = Image.new("P", (3, 2), 0)
    palette.putpalette([255, 0, 0])
    assert decode(encoded(palette, transparency=0)).getpixel((1, 1)) == (255, 255, 255)
    assert decode(encoded(palette)).getpixel((1, 1)) == (255, 0, 0)
    keyed = Image.new("RGB", (3, 2), (1, 2, 3))
    assert decode(encoded(keyed, transparency=(1, 2, 3))).getpixel((0, 0)) == (255, 255, 255)
    half = decode(encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 128)))).getpixel((0, 0))
    assert half == (127, 127, 127)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([[0, 257, 32768, 65535]], np.uint16), [0, 1, 128, 255]),
        (np.array([[0, 257, 32768, 65535]], np.int32), [0, 1, 128, 255]),
        (np.array([[0, 10, 128, 255]], np.int32), [0, 10, 128, 255]),
        (np.array([[0, 0.25, 0.5, 1]], np.float32), [0, 64, 128, 255]),
        (np.array([[-5, np.nan, 128, 255]], np.float32), [0, 0, 128, 255]),
        (np.array([[0, 1 << 20, 1 << 21, 1 << 22]], np.int32), [0, 64, 128, 255]),
    ],
)
def test_deep_pictures_are_scaled_not_clipped(array: np.ndarray, expected: list[int]) -> None:
    rgb = np.asarray(decode(Image.fromarray(array)))
    assert rgb[0, :, 0].tolist() == expected
    assert (rgb[..., 0] == rgb[..., 2]).all()


def test_a_16_bit_png_keeps_its_middle_grey() -> None:
    data = encoded(Image.fromarray(np.full((4, 4), 0x8000, np.uint16)))
    assert decode(data).getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = Image.fromarray(noise(8, 8)).convert(mode)
    assert np.array_equal(np.asarray(decode(image)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), c) for c in ("red", "blue", "green")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert decode(data).getpixel((0, 0)) == (255, 0, 0)


def test_every_source_gives_the_same_picture(tmp_path: Path) -> None:
    array = noise(9, 5)
    data = encoded(Image.fromarray(array))
    path = tmp_path / "a.png"
    path.write_bytes(data)
    reversed_view = np.ascontiguousarray(array[:, ::-1])[:, ::-1]
    for source in (path, str(path), data, Image.open(path), array, reversed_view):
        assert open_image(source).size == (9, 5)
        assert np.array_equal(np.asarray(decode(source)), array)


def test_the_callers_own_picture_stays_its_own() -> None:
    image = Image.fromarray(noise(4, 4))
    ours = decode(image)
    image.putpixel((0, 0), (1, 2, 3))
    assert ours.getpixel((0, 0)) != (1, 2, 3)


def jpeg() -> bytes:
    return encoded(Image.fromarray(noise(64, 64)), "JPEG")


@pytest.mark.parametrize(
    "data",
    [jpeg()[:-2], jpeg()[:-128], jpeg()[: len(jpeg()) // 2],
     encoded(Image.new("RGB", (64, 64)))[:60],
     b"", b"hello", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\0\0\0\0WEBP",
     b"%!PS-Adobe-3.0 EPSF-3.0\n"],
)  # fmt: skip
def test_damaged_bytes_are_a_bad_image(data: bytes) -> None:
    with pytest.raises(BadImage, match="image"):
        decode(data)
    assert decode(jpeg()).size == (64, 64)


def test_a_path_that_gives_no_picture_says_why(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.png").write_bytes(b"")
    cases = {
        str(tmp_path): "is a directory",
        str(tmp_path / "none.png"): "does not exist",
        str(tmp_path / "pipe"): "not a regular file",
        str(tmp_path / "empty.png"): "not a picture",
        "a\0b": "cannot be read",
        "x" * 5000: "cannot be read",
        "data:image/png;base64,AAAA": "does not exist",
    }
    for path, reason in cases.items():
        with pytest.raises(BadImage, match=reason):
            open_image(path)


def test_no_permission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.new("RGB", (2, 2))))

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(BadImage, match="permission denied"):
        open_image(path)


@pytest.mark.parametrize(
    "source",
    [None, 3, 1.5, ["a.png"], bytearray(b"x"), noise(4, 4).astype(float), noise(4, 4)[..., 0],
     noise(4, 4, 4), np.zeros((0, 4, 3), np.uint8), noise(4, 4)[None]],
)  # fmt: skip
def test_a_wrong_source_is_refused_in_one_sentence(source: Any) -> None:
    with pytest.raises(BadImage, match="expected"):
        open_image(source)


def bomb(width: int, height: int) -> bytes:
    """A grey PNG of zeros, without the time and memory that Pillow would take to write it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    pack, row = zlib.compressobj(9), bytes(width + 1)
    pixels = b"".join(pack.compress(row) for _ in range(height)) + pack.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def test_a_bomb_is_refused_from_its_header() -> None:
    data = bomb(12000, 12000)
    assert len(data) < 200_000
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_kib()
    with pytest.raises(
        BadImage, match=r"12000x12000 = 144,000,000 pixels; the limit is 67,108,864"
    ):
        decode(data)
    assert peak_kib() - before < 20 * 1024
    assert open_image(data, max_decoded_pixels=144_000_000).size == (12000, 12000)
    with pytest.raises(BadImage, match=r"over 178,956,970 pixels; the limit is 67,108,864"):
        open_image(bomb(30000, 6000))


def test_opening_decodes_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [
        encoded(Image.new("RGB", (64, 64)), k) for k in ("PNG", "JPEG", "GIF", "TIFF", "BMP")
    ]
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    for data in sources:
        assert open_image(data).size == (64, 64)


def test_no_file_stays_open(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.jpg", tmp_path / "b.jpg"
    good.write_bytes(jpeg())
    bad.write_bytes(jpeg()[:-128])
    decode(good)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        opened = open_image(good)
        decode(opened)
        with pytest.raises(BadImage):
            decode(bad)
    assert len(os.listdir("/proc/self/fd")) == before


def test_pillows_warnings_stay_inside() -> None:
    data = encoded(Image.new("L", (10000, 9000)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        open_image(data, max_decoded_pixels=1 << 30)
    assert not seen
    with pytest.warns(UserWarning, match="ours"):
        warnings.warn("ours", stacklevel=1)


def test_a_picture_that_changed_since_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.new("RGB", (4, 4))))
    opened = open_image(path)
    path.write_bytes(encoded(Image.new("RGB", (8, 4))))
    with pytest.raises(BadImage, match="8x4 pixels where its header said 4x4"):
        decode(opened)


def test_a_digest_names_pixels_and_shape() -> None:
    a = Image.fromarray(noise(300, 600))
    b = a.copy()
    assert image_digest(a) == image_digest(b)
    b.putpixel((299, 599), (1, 2, 3))
    assert image_digest(a) != image_digest(b)
    assert image_digest(Image.new("RGB", (2, 8))) != image_digest(Image.new("RGB", (8, 2)))


@pytest.mark.parametrize(
    ("payload", "expected"),
    [("aGVsbG8=", b"hello"), ("aGVsbG8", b"hello"), ("aGVs\nbG 8=", b"hello"),
     ("/+8=", b"\xff\xef")],
)  # fmt: skip
def test_a_data_url_may_lack_padding_and_hold_white_space(payload: str, expected: bytes) -> None:
    assert decode_data_url("data:image/png;base64," + payload) == expected
    assert decode_data_url("DATA:;base64," + payload) == expected


@pytest.mark.parametrize(
    "url",
    ["data:image/png;base64", "data:image/png,aGVsbG8=", "data:image/png;base64,YWJj-_==",
     "data:image/png;base64,aGVsbG8%3D", "data:image/png;base64,", "data:image/png;base64,  ",
     "aGVsbG8=", base64.b64encode(b"x" * 300).decode(), "data:image/png;base64,aGVsb",
     "data:image/png;base64,aG=Vs", "data:image/png;base64,é", ""],
)  # fmt: skip
def test_a_bad_data_url_is_the_callers_fault(url: str) -> None:
    with pytest.raises(BadParameter):
        decode_data_url(url)
