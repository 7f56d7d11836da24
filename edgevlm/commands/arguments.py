"""What each sub-command of the runtime accepts. Imports argparse alone, so that help is instant."""

import argparse
import re
from pathlib import Path

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Fields of SamplingParams with a flag of the same name; a test holds the two together.
SAMPLING = (
    (
        "max_tokens",
        int,
        "N",
        "stop after N tokens (default: where the model ends, or no more fit)",
    ),
    ("temperature", float, "T", "0 takes the likeliest token; higher is more varied"),
    ("top_p", float, "P", "keep the likeliest tokens that together reach P"),
    ("top_k", int, "K", "keep the K likeliest tokens"),
    ("min_p", float, "P", "drop tokens less likely than P times the likeliest"),
    ("repetition_penalty", float, "R", "above 1: tokens seen before become less likely"),
    ("presence_penalty", float, "X", "take X from tokens that were answered before"),
    ("frequency_penalty", float, "X", "take X from them for every time"),
    ("seed", int, "S", "the same seed gives the same answer"),
    ("logprobs", int, "N", "with --json: log-probabilities, and the N likeliest of each step"),
)


def run(parser: argparse.ArgumentParser) -> None:
    """`edgevlm run`."""
    _bundle(parser)
    parser.add_argument("question", help="what to ask; - reads it from standard input")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="a picture; may be repeated"
    )
    _common(parser)
    json_flag(parser, "text, tokens, timings and memory")


def chat(parser: argparse.ArgumentParser) -> None:
    """`edgevlm chat`."""
    _bundle(parser)
    _common(parser)


def inspect(parser: argparse.ArgumentParser) -> None:
    """`edgevlm inspect`."""
    _bundle(parser)
    json_flag(parser, "the plan, the limits and the build report")


def doctor(parser: argparse.ArgumentParser) -> None:
    """`edgevlm doctor`."""
    parser.add_argument("bundle", type=Path, nargs="?", help="a bundle to hold against the machine")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="read proc, sys and etc from a copy of another machine's (default: %(default)s)",
    )
    json_flag(parser, "every check, and the machine's facts")


def verify(parser: argparse.ArgumentParser) -> None:
    """`edgevlm verify`."""
    _bundle(parser)
    _machine(parser)
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write all that was found, to send with a bug"
    )
    json_flag(parser, "every check, and the figures behind them")


def bench(parser: argparse.ArgumentParser) -> None:
    """`edgevlm bench`."""
    _bundle(parser)
    parser.add_argument(
        "--prompt-tokens",
        type=positive,
        default=256,
        metavar="N",
        help="text tokens of each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--new-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="tokens to generate each time (default: %(default)s)",
    )
    parser.add_argument(
        "--runs",
        type=positive,
        default=3,
        metavar="N",
        help="measured runs after one to warm up (default: %(default)s)",
    )
    parser.add_argument("--image", metavar="FILE", help="a picture to put into every prompt")
    _machine(parser)
    json_flag(parser, "medians, and every run")


def json_flag(parser: argparse.ArgumentParser, what: str) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help=f"print one JSON document: {what}")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def byte_size(text: str) -> int:
    """Bytes: "6GiB", "512MiB", "1.5G" (a unit is always a power of 1024) or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 6GiB, 512MiB or bytes")
    return int(float(match[1]) * UNITS[match[2].upper()])


def pixel_count(text: str) -> int:
    """Pixels: "640x480" or a plain number."""
    match = re.fullmatch(r"(\d+)(?:\s*[xX×]\s*(\d+))?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 640x480 or a number")
    return int(match[1]) * int(match[2] or 1)


def _bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="a directory made by `edgevlm build`")


def _common(parser: argparse.ArgumentParser) -> None:
    """What `run` and `chat` share."""
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    group = parser.add_argument_group("sampling", "Where nothing is given, the model's own values.")
    for name, kind, metavar, text in SAMPLING:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end")
    _machine(parser)


def _machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--executor", metavar="NAME", help="default: what the bundle was built for")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads (default: every core)"
    )
