"""What each sub-command of the runtime accepts. Imports argparse alone, so that help is instant."""

import argparse
import re
from pathlib import Path
from typing import Any

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


def serve(parser: argparse.ArgumentParser) -> None:
    """`edgevlm serve`. Defaults of limits stand in `server.settings` as well; a test compares."""
    _bundle(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    parser.add_argument(
        "--port", type=port, default=8000, help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what clients call the model; may be repeated (default: the bundle's directory)",
    )
    _serve_access(parser.add_argument_group("who may ask"))
    _serve_limits(parser.add_argument_group("limits"))
    _serve_pictures(parser.add_argument_group("pictures"))
    parser.add_argument("--access-log", action="store_true", help="log every request")
    _machine(parser)


def _serve_access(group: Any) -> None:
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="keys, one a line; any of them opens"
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key; other users of this machine can see it",
    )
    group.add_argument(
        "--insecure", action="store_true", help="no key although other machines can reach it"
    )
    group.add_argument(
        "--open-route",
        action="append",
        default=[],
        metavar="PATH",
        help="needs no key, as /health never does; may be repeated",
    )
    group.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a Host header that is accepted on loopback besides localhost",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages from there may use the service; may be repeated (default: none)",
    )


def _serve_limits(group: Any) -> None:
    group.add_argument(
        "--max-queue",
        type=positive,
        default=32,
        metavar="N",
        help="requests that may wait for a slot (default: %(default)s)",
    )
    group.add_argument(
        "--max-body",
        type=byte_size,
        metavar="BYTES",
        help="of a request (default: room for every picture it may have)",
    )
    group.add_argument(
        "--deadline",
        type=seconds,
        metavar="SECONDS",
        help="end an answer that takes longer, its waiting included (default: none)",
    )
    group.add_argument(
        "--grace",
        type=seconds,
        default=20.0,
        metavar="SECONDS",
        help="for running answers at SIGTERM (default: %(default)s)",
    )


def _serve_pictures(group: Any) -> None:
    group.add_argument(
        "--max-image-bytes",
        type=byte_size,
        default=8 << 20,
        metavar="BYTES",
        help="of one encoded picture (default: 8MiB)",
    )
    group.add_argument(
        "--max-image-pixels",
        type=pixel_count,
        default=32 << 20,
        metavar="N",
        help="of one picture before it is scaled (default: 33554432)",
    )
    group.add_argument(
        "--allow-image-hosts",
        action="append",
        default=[],
        metavar="HOST,...",
        help="fetch pictures from these: names, *.names, or addresses (default: none)",
    )
    group.add_argument(
        "--image-folder", type=Path, metavar="DIR", help="file: URLs may point below it"
    )


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


def port(text: str) -> int:
    """A TCP port; 0: any that is free."""
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port (0 to 65535)")
    return value


def seconds(text: str) -> float:
    """A time above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def token_bias(text: str) -> tuple[int, float]:
    """ "17=-100": a token's id, and what is added to its logit."""
    token, _, bias = text.partition("=")
    return int(token), float(bias)


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
    group.add_argument(
        "--logit-bias",
        action="append",
        type=token_bias,
        metavar="ID=X",
        help="add X (-100 to 100) to a token's logit; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end")
    _machine(parser)


def _machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--executor", metavar="NAME", help="default: what the bundle was built for")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads (default: every core)"
    )
