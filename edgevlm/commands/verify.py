"""`edgevlm verify`: the first thing to run on a board, and the report to send where it fails."""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

from edgevlm import __version__
from edgevlm.bundle import read_manifest
from edgevlm.commands.doctor import table
from edgevlm.commands.refusal import Refused
from edgevlm.config import to_dict
from edgevlm.device import read_machine
from edgevlm.errors import BundleError, EdgeVLMError, ExecutorError
from edgevlm.machine_checks import Check, machine_checks
from edgevlm.verify import Verification, verify


def execute(args: argparse.Namespace) -> dict[str, Any]:
    """Print every finding. Raises Refused, with all of them, where one of them is a failure."""
    try:
        found = verify(args.bundle, args.executor, threads=args.threads)
    except (BundleError, ExecutorError) as error:  # a report says more than the error alone
        remedy = "`edgevlm doctor BUNDLE` says what is missing"
        check = Check("start", "fail", str(error), "a bundle that runs here", remedy)
        found = Verification((check,), {})
    document = {
        "ok": not found.failed,
        "checks": [to_dict(check) for check in found.checks],
        "bundle": str(args.bundle),
        **found.figures,
    }
    if args.report is not None:
        _write_report(args.report, args.bundle, document)
    if not args.json:
        print(table(found.checks))
    if found.failed:
        first = found.failed[0]
        text = first.found
        if first.name != "start":
            names = ", ".join(check.name for check in found.failed)
            text = f"{args.bundle} does not answer as its checkpoint does: {names}"
        raise Refused(EdgeVLMError(text), document)
    return document


def _write_report(path: Path, bundle: Path, document: dict[str, Any]) -> None:
    """All that somebody else needs to see what went wrong; no prompt of anybody's is in it."""
    machine = read_machine()
    try:
        manifest: Any = to_dict(read_manifest(bundle))
    except BundleError as error:
        manifest = str(error)
    report = {
        **document,
        "machine": to_dict(machine),
        "machine_checks": [to_dict(check) for check in machine_checks(machine)],
        "versions": {
            "edgevlm": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "manifest": manifest,
    }
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EdgeVLMError(f"the report cannot be written: {error}") from None
