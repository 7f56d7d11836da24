"""`edgevlm doctor`: what this machine is, what it lacks, and what to type about it.

Without a bundle neither numpy nor rich is loaded: it must be quick, and work where they are broken.
"""

import argparse
import importlib
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgevlm.commands.refusal import Refused
from edgevlm.config import to_dict
from edgevlm.device import Machine, read_machine
from edgevlm.errors import BundleError, EdgeVLMError
from edgevlm.machine_checks import Check, machine_checks

MARKS = {"ok": "ok", "warn": "warn", "fail": "FAIL"}


def execute(args: argparse.Namespace) -> dict[str, Any]:
    """Print every finding. Raises Refused, with all of them, where one of them is a failure."""
    machine = read_machine(args.root)
    checks = machine_checks(machine)
    if args.bundle is not None:
        checks = _merged(checks, _bundle(args.bundle, machine))
    failed = [check.name for check in checks if check.status == "fail"]
    document: dict[str, Any] = {
        "ok": not failed,
        "checks": [to_dict(check) for check in checks],
        "machine": to_dict(machine),
    }
    if args.bundle is not None:
        document["bundle"] = str(args.bundle)
    if not args.json:
        print(table(checks))
    if failed:
        raise Refused(EdgeVLMError(f"this will not work as it is: {', '.join(failed)}"), document)
    return document


def _bundle(path: Path, machine: Machine) -> list[Check]:
    """A bundle's checks. Its modules, which load numpy, are imported only here."""
    try:
        bundle = importlib.import_module("edgevlm.bundle").open_bundle(path, check=False)
    except BundleError as error:
        remedy = "give the directory that `edgevlm build` made"
        return [Check("bundle", "fail", str(error), "a whole bundle", remedy)]
    found = f"{path}: {bundle.manifest.target}, {bundle.manifest.weights}"
    checks: list[Check] = importlib.import_module("edgevlm.checks").bundle_checks(
        bundle.manifest, machine
    )
    return [Check("bundle", "ok", found), *checks]


def _merged(general: list[Check], special: list[Check]) -> list[Check]:
    """Both lists without the conditions that stand in both."""
    names = {check.name for check in general}
    return [*general, *(check for check in special if check.name not in names)]


def table(checks: Sequence[Check]) -> str:
    """Every finding, with what is needed and what to type where one is not ok."""
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    names = max(len(check.name) for check in checks)
    indent = " " * (names + 8)
    lines = []
    for check in checks:
        head = f"{check.name:<{names}}  {MARKS[check.status]:<4}  "
        lines.append(_wrapped(head, indent, check.found, width))
        if check.status != "ok":
            lines.append(_wrapped(f"{indent}needed: ", indent, check.needed, width))
            # Never wrapped: it is there to be copied.
            lines.append(f"{indent}remedy: {_printable(check.remedy)}")
    return "\n".join(lines)


def _wrapped(head: str, indent: str, text: str, width: int) -> str:
    return textwrap.fill(
        _printable(text),
        width,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _printable(text: str) -> str:
    """What a file holds may be a terminal's control codes."""
    return "".join(c if c.isprintable() else "?" for c in text)
