"""What `edgevlm plan` accepts, and the flags that `edgevlm build` shares with it."""

import argparse
from pathlib import Path

from edgevlm.commands.arguments import byte_size, json_flag, pixel_count, positive


def plan(parser: argparse.ArgumentParser) -> None:
    """`edgevlm plan`."""
    parser.add_argument("model", help="a preset such as qwen2-vl-2b, a directory or a config.json")
    parser.add_argument(
        "--device",
        required=True,
        metavar="D",
        help="orin-nano-8gb, agx-orin-64gb, thor-t5000, rtx-8gb, ..., this-machine, or bytes: 8GiB",
    )
    parser.add_argument("--executor", choices=("host", "tensorrt"), help="default: the device's")
    parser.add_argument("--lowering", choices=("native", "classic"), help="for TensorRT devices")
    limits(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg, .png or .html")
    json_flag(parser, "the ledger, what fits, projections")


def limits(parser: argparse.ArgumentParser) -> None:
    """Flags that decide a plan, all but the target."""
    parser.add_argument("--weights", choices=("int4", "fp16", "fp32"), help="of the language model")
    parser.add_argument("--group-size", type=positive, metavar="N", help="INT4 weights per scale")
    parser.add_argument("--max-seq-len", type=positive, metavar="N", help="tokens in a slot")
    parser.add_argument(
        "--max-pixels", type=pixel_count, metavar="WxH", help="of an image; 640x480 or a number"
    )
    parser.add_argument("--max-images", type=positive, metavar="N", help="in one request")
    parser.add_argument("--max-prefill-chunk", type=positive, metavar="N", help="tokens at a time")
    parser.add_argument("--slots", type=positive, metavar="N", help="answers at the same time")
    parser.add_argument(
        "--memory-budget",
        type=byte_size,
        metavar="SIZE",
        help="find the largest limits that fit; refuse what cannot",
    )
    parser.add_argument(
        "--reserve", type=byte_size, metavar="SIZE", help="of the budget, for other processes"
    )
    parser.add_argument("--min-seq-len", type=positive, metavar="N", help="refuse fewer tokens")
    parser.add_argument("--min-pixels", type=pixel_count, metavar="WxH", help="refuse fewer pixels")
