"""What the plan admits runs, to the last token and pixel; one more is refused before decoding."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from edgevlm import VLM, SamplingParams
from edgevlm.errors import BadImage, BadParameter, PromptTooLong, TooManyImages
from tests.tiny_models import MAX_PIXELS, TinyModels, picture

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
SIDE = 112  # MAX_PIXELS is its square


@pytest.fixture(scope="module")
def vlm(tiny: TinyModels) -> Iterator[VLM]:
    assert SIDE * SIDE == MAX_PIXELS
    with VLM(tiny.get("qwen2_vl").bundle.path, threads=1) as opened:
        yield opened


def undecodable(width: int, height: int) -> bytes:
    """A picture whose header is fine: whoever decodes it raises BadImage."""
    out = io.BytesIO()
    picture(width, height).save(out, "PNG")
    return out.getvalue()[:60]


def longest_text(vlm: VLM, images: list[Image.Image], room: int) -> str:
    """A question that leaves `room` tokens: one byte is one token here."""
    limits = vlm.bundle.manifest.limits
    used: int = vlm.generate("", images, ONE).usage["prompt_tokens"]
    return "a" * (limits.max_seq_len - used - room)


def test_the_most_and_largest_pictures_with_the_longest_prompt_run(vlm: VLM) -> None:
    limits = vlm.bundle.manifest.limits
    images = [picture(SIDE, SIDE, seed) for seed in range(limits.max_images)]
    answer = vlm.generate(longest_text(vlm, images, 1), images, ONE)
    usage = answer.usage
    assert usage["prompt_tokens"] == limits.max_seq_len - 1
    assert usage["image_tokens"] == limits.max_images * 16
    assert answer.token_ids and answer.finish_reason == "length"
    assert vlm.allocations_after_start == 0


def test_one_token_more_is_refused_with_both_numbers(vlm: VLM) -> None:
    limits = vlm.bundle.manifest.limits
    text = longest_text(vlm, [picture(SIDE, SIDE)], 0)
    with pytest.raises(PromptTooLong) as error:
        vlm.generate(text, [undecodable(SIDE, SIDE)], ONE)
    assert str(error.value).count(f"{limits.max_seq_len:,}") == 2  # what it has, what is allowed


def test_one_picture_more_is_refused_with_both_numbers(vlm: VLM) -> None:
    most = vlm.bundle.manifest.limits.max_images
    with pytest.raises(TooManyImages, match=f"{most + 1} images.*built for {most}"):
        vlm.generate("?", [undecodable(28, 28)] * (most + 1), ONE)


def test_a_larger_picture_is_scaled_and_the_answer_says_so(vlm: VLM) -> None:
    (entry,) = vlm.generate("?", [picture(500, 400)], ONE).usage["images"]
    assert entry["original"] == [500, 400]
    width, height = entry["used"]
    assert width * height <= MAX_PIXELS and entry["tokens"] == width * height // 28**2


def message(detail: Any, kind: str, source: bytes) -> list[dict[str, Any]]:
    if kind == "image":
        part: dict[str, Any] = {"type": "image", "detail": detail}
    else:
        url = "data:image/png;base64," + base64.b64encode(source).decode()
        part = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
    return [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]


def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    picture(width, height).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_strict_refuses_what_would_be_scaled_before_decoding(vlm: VLM, kind: str) -> None:
    source = undecodable(500, 400)
    with pytest.raises(BadImage, match=r"500x400.*12,544 pixels.*scale it to 112x84"):
        images = [source] if kind == "image" else []
        vlm.generate(message("strict", kind, source), images, ONE)


@pytest.mark.parametrize("kind", ["image", "image_url"])
@pytest.mark.parametrize(
    ("detail", "size"),
    [
        ("strict", (SIDE, SIDE)),
        ("strict", (SIDE + 10, SIDE - 10)),  # rounding to whole patches is no scaling down
        ("strict", (5, 5)),
        ("auto", (500, 400)),
        ("low", (500, 400)),
        ("high", (500, 400)),
        (None, (500, 400)),
    ],
)
def test_everything_else_is_answered(
    vlm: VLM, kind: str, detail: Any, size: tuple[int, int]
) -> None:
    source = png(*size)
    images = [source] if kind == "image" else []
    usage = vlm.generate(message(detail, kind, source), images, ONE).usage
    assert usage["images"][0]["original"] == list(size)


@pytest.mark.parametrize("detail", ["", "STRICT", "original", 1, ["auto"]])
def test_other_details_are_refused_by_name(vlm: VLM, detail: Any) -> None:
    with pytest.raises(BadParameter, match=r"messages\[0\]\.content\[0\]\.detail"):
        vlm.generate(message(detail, "image_url", png(28, 28)), [], ONE)
