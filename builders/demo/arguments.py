"""What `edgevlm demo` accepts. Imports nothing heavy, so that help is instant."""

import argparse
from pathlib import Path

from edgevlm.commands.arguments import json_flag, positive


def demo(parser: argparse.ArgumentParser) -> None:
    """`edgevlm demo`."""
    parser.add_argument(
        "--eval", type=positive, metavar="N", help="draw N fresh scenes and measure accuracy"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of those scenes (default: %(default)s)"
    )
    parser.add_argument(
        "--weights",
        choices=("int4", "fp32"),
        default="int4",
        help="of the language model (default: %(default)s)",
    )
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="the bundle (default: bundles/demo-WEIGHTS)"
    )
    parser.add_argument("--force", action="store_true", help="build the bundle again")
    parser.add_argument("--threads", type=positive, metavar="N", help="default: every core")
    json_flag(parser, "the answers, and with --eval the accuracy in total and by kind")
