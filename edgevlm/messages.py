"""Messages as OpenAI writes them, checked and brought into the form that chat templates read.

Knows roles, parts and which picture belongs to which part; knows nothing about tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from edgevlm.config import ImageProcessorConfig
from edgevlm.errors import BadImage, BadParameter
from edgevlm.images import ImageSource, OpenImage, decode_data_url, open_image
from edgevlm.preprocess import resized_size, unscaled_size

# OpenAI's three mean the same here, where the bundle's plan has the say; strict is ours.
DETAILS = ("auto", "low", "high", "strict")
ROLES = ("system", "developer", "user", "assistant", "tool")


def from_text(text: str, num_images: int) -> list[dict[str, Any]]:
    """A plain question as one user message, pictures first, as the families' examples put them."""
    if not num_images:
        return [{"role": "user", "content": text}]
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in range(num_images)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def normalise(
    messages: Sequence[Mapping[str, Any]],
    images: Sequence["ImageSource | OpenImage"],
    accepts_images: bool = True,
    processor: ImageProcessorConfig | None = None,
) -> tuple[list[dict[str, Any]], list[OpenImage]]:
    """Messages for the template, and the pictures in the order of their parts, headers read.

    {"type": "image"} parts take `images` in order; {"type": "image_url"} parts bring their own as a
    data URL. A text model's template reads strings, so for it text parts are joined. A picture of
    `detail` "strict" that `processor` would scale down is refused.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise BadParameter(f"messages is {type(messages).__name__}, not a list of messages")
    if not messages:
        raise BadParameter("messages is empty; send at least one message")
    waiting = list(images)
    asked = sum(_is_image_part(p) for m in messages for p in _parts(m))
    if asked != len(waiting):
        raise BadParameter(
            f'messages have {asked} parts {{"type": "image"}} but {len(waiting)} images were given'
        )
    opened: list[OpenImage] = []
    strict: list[tuple[OpenImage, str]] = []
    normal = [
        _message(m, f"messages[{i}]", waiting, opened, strict) for i, m in enumerate(messages)
    ]
    if opened and not accepts_images:
        raise BadParameter(
            f"this bundle's model reads text only; the request has {len(opened)} images"
        )
    if processor is not None:
        for image, where in strict:
            _refuse_scaling(image, where, processor)
    if not accepts_images:
        for message in normal:
            if isinstance(message.get("content"), list):
                message["content"] = "".join(part["text"] for part in message["content"])
    return normal, opened


def _parts(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def _is_image_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _message(
    message: Any,
    where: str,
    waiting: list[Any],
    opened: list[OpenImage],
    strict: list[tuple[OpenImage, str]],
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadParameter(
            f"{where} is {type(message).__name__}, not an object with role and content"
        )
    role = message.get("role")
    if role not in ROLES:
        raise BadParameter(f"{where}.role is {role!r}, not one of {', '.join(ROLES)}")
    # As transformers: a field that is null is a field that is not there.
    normal = {str(k): v for k, v in message.items() if v is not None}
    if role == "developer":  # OpenAI's newer word for it; templates know the older
        normal["role"] = "system"
    content = normal.get("content")
    if isinstance(content, list | tuple):
        if not content:
            raise BadParameter(f"{where}.content is an empty list; send text or an image")
        parts = []
        for i, part in enumerate(content):
            at = f"{where}.content[{i}]"
            before = len(opened)
            parts.append(_part(part, at, waiting, opened))
            if len(opened) > before and _detail(part, at) == "strict":
                strict.append((opened[-1], at))
        normal["content"] = parts
    elif content is None and role == "assistant" and normal.get("tool_calls"):
        normal["content"] = ""
    elif not isinstance(content, str):
        raise BadParameter(f"{where}.content is {content!r}, not a string or a list of parts")
    return normal


def _part(part: Any, where: str, waiting: list[Any], opened: list[OpenImage]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise BadParameter(f"{where}.text is {part.get('text')!r}, not a string")
        return {"type": "text", "text": part["text"]}
    if kind == "image":
        source = waiting.pop(0)
        opened.append(source if isinstance(source, OpenImage) else open_image(source))
        return {"type": "image"}
    if kind == "image_url":
        opened.append(open_image(_image_url(part.get("image_url"), where)))
        return {"type": "image"}
    if isinstance(kind, str) and "video" in kind:
        raise BadParameter(
            f"{where} is of type {kind!r}: only still pictures are read; send frames as images"
        )
    shown = kind if isinstance(part, Mapping) else part
    raise BadParameter(f"{where} is of type {shown!r}, not one of text, image, image_url")


def _detail(part: Mapping[str, Any], where: str) -> str:
    """`detail` of an image part; OpenAI writes it inside image_url."""
    url = part.get("image_url")
    given = url.get("detail") if isinstance(url, Mapping) else part.get("detail")
    if given is None:
        return "auto"
    if given not in DETAILS:
        raise BadParameter(f"{where}.detail is {given!r}, not one of {', '.join(DETAILS)}")
    return str(given)


def _refuse_scaling(image: OpenImage, where: str, processor: ImageProcessorConfig) -> None:
    used, wanted = resized_size(processor, image.size), unscaled_size(processor, image.size)
    if used != wanted:
        raise BadImage(
            f"{where} has detail strict and is {image.size[0]}x{image.size[1]}; this bundle takes "
            f"{processor.max_pixels:,} pixels and would scale it to {used[0]}x{used[1]}: send it "
            "smaller, leave detail out, or rebuild with --max-pixels"
        )


def _image_url(value: Any, where: str) -> bytes:
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise BadParameter(f"{where}.image_url.url is {url!r}, not a string")
    if url[:5].lower() != "data:":
        raise BadParameter(
            f"{where}.image_url.url is {url[:40]!r}; "
            "only data URLs (data:image/...;base64,...) are read here"
        )
    return decode_data_url(url)
