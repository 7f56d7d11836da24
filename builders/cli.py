"""`edgevlm build`: flags become BuildOptions, figures become a document and tables."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from builders.build import BuildOptions, build, check_budget, prepare
from builders.plan_arguments import limits
from builders.projection import build_peak
from builders.targets import TARGETS, THIS_MACHINE
from edgevlm.commands.arguments import json_flag
from edgevlm.commands.inspect import document, print_bundle
from edgevlm.commands.plan_report import (
    human_bytes,
    plan_document,
    print_limits,
    print_plan,
)
from edgevlm.commands.progress import BuildProgress
from edgevlm.commands.refusal import Refused
from edgevlm.commands.terminal import terminal
from edgevlm.config import to_dict
from edgevlm.errors import OverBudget

DEFAULTS = BuildOptions()


def arguments(parser: argparse.ArgumentParser) -> None:
    """`edgevlm build`. Defaults are those of BuildOptions."""
    parser.add_argument("checkpoint", type=Path, help="a Hugging Face model directory")
    parser.add_argument("out", type=Path, help="the bundle to make")
    parser.add_argument("--target", choices=[*TARGETS, THIS_MACHINE], help="what it will run on")
    parser.add_argument("--lowering", choices=("native", "classic"), help="for TensorRT targets")
    limits(parser)
    parser.add_argument(
        "--no-reference",
        dest="reference",
        action="store_false",
        help="store no float32 logits for `edgevlm verify` to compare with",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and build nothing")
    parser.add_argument("--force", action="store_true", help="replace the bundle that is there")
    json_flag(parser, "what `edgevlm inspect` prints")
    # Flags default to None, so that BuildOptions alone holds the defaults; help shows those.
    for action in parser._actions:
        if (default := getattr(DEFAULTS, action.dest, None)) is not None and action.nargs != 0:
            action.help = f"{action.help} (default: {default})"


def options_of(args: argparse.Namespace) -> BuildOptions:
    """What was asked for, defaults for the rest."""
    names = [field.name for field in dataclasses.fields(BuildOptions)]
    given = {name: getattr(args, name) for name in names}
    return BuildOptions(**{name: value for name, value in given.items() if value is not None})


def execute(args: argparse.Namespace) -> dict[str, Any]:
    """Build, or with --dry-run only plan."""
    options = options_of(args)
    if args.dry_run:
        return _dry_run(args, options)
    with BuildProgress() as progress:
        bundle = build(args.checkpoint, args.out, options, progress=progress)
    if not args.json:
        print_bundle(terminal(), bundle)
    return document(bundle)


def _dry_run(args: argparse.Namespace, options: BuildOptions) -> dict[str, Any]:
    prepared = prepare(args.checkpoint, options)
    plan = prepared.plan
    peak = build_peak(
        prepared.model,
        prepared.policy,
        prepared.target,
        len(prepared.source.tokenizer_json.encode()),
    )
    if not args.json:
        console = terminal()
        print_plan(console, plan)
        print_limits(console, plan)
        console.print(f"the build itself: about {human_bytes(peak.bytes)} ({peak.formula})")
    whole = plan_document(plan) | {"build_peak": to_dict(peak)}
    try:
        check_budget(plan, prepared.changes)
    except OverBudget as error:
        raise Refused(error, whole) from error
    return whole
