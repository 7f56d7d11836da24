"""Flags become a request, and the deltas of its answer become text on the terminal."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from edgevlm.commands.arguments import SAMPLING
from edgevlm.generation import Delta, Generation
from edgevlm.sampling import SamplingParams


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What was asked for; everything else is left to the bundle. Raises BadParameter."""
    given = {name: getattr(args, name) for name, *_ in SAMPLING}
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        **given,
        stop=tuple(args.stop or ()),
        ignore_eos=args.ignore_eos,
        logit_bias=tuple(args.logit_bias or ()),
    )


def conversation(system: str | None) -> list[dict[str, Any]]:
    """The beginning of a list of messages."""
    return [] if system is None else [{"role": "system", "content": printable(system)}]


def user_message(text: str, num_images: int) -> dict[str, Any]:
    """A question with places for its pictures, which stand before it."""
    text = printable(text)
    if not num_images:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in range(num_images)]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def printable(text: str) -> str:
    """Bytes of the command line that are not UTF-8 become the replacement character."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class Echo:
    """Prints an answer while it comes; what was printed stays in `text` if it is cut short."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, deltas: Iterator[Delta]) -> Generation:
        """Print all of it. The stream is closed however this ends."""
        generation = None
        with contextlib.closing(deltas):  # type: ignore[type-var]
            for delta in deltas:
                self.text += delta.text
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                generation = delta.generation
        assert generation is not None, "a stream ends with its generation"
        return generation


def speed_line(generation: Generation) -> str:
    """Tokens and times of one answer, for people."""
    usage, timings = generation.usage, generation.timings
    text = f"{usage['prompt_tokens']} tokens in"
    if usage["image_tokens"]:
        text += f" ({usage['image_tokens']} of pictures)"
    if usage["cached_tokens"]:
        text += f", {usage['cached_tokens']} of them cached"
    text += f"; first token after {timings['first_token_ms']:.0f} ms"
    steps = usage["completion_tokens"] - 1
    if steps > 0 and timings["decode_ms"] > 0:
        text += f"; {steps * 1e3 / timings['decode_ms']:.1f} tokens/s"
    return text
