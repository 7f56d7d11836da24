"""Runs a bundle once in a process of its own: to make a reference, or to hold it against one.

`record` writes what bundles say as the reference; `verify` answers with all that was found.
"""

import json
import sys
from pathlib import Path

import numpy as np

from edgevlm.bundle import Bundle, open_bundle
from edgevlm.config import to_dict
from edgevlm.errors import EdgeVLMError
from edgevlm.reference import Reference, read_reference, write_reference
from edgevlm.runner import ModelRunner
from edgevlm.verify import Outcome, recorded, run_case, verify, with_rounded
from edgevlm.vlm import make_executor


def main(arguments: list[str]) -> int:
    """Exit code 0, or 1 with one line on stderr."""
    try:
        if arguments[0] == "record":
            text = _record(Path(arguments[1]), *map(Path, arguments[2:]))
        else:
            found = verify(arguments[1])
            checks = [to_dict(check) for check in found.checks]
            text = json.dumps({"checks": checks, "figures": found.figures})
    except EdgeVLMError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(text + "\n")
    return 0


def _record(out: Path, whole: Path, rounded: Path | None = None) -> str:
    """Write `out`; what stands against it as a reference, or nothing."""
    bundle = open_bundle(whole)
    reference = read_reference(bundle)
    outcomes = _run(bundle, reference)
    if not all(np.isfinite(outcome.logits).all() for outcome in outcomes):
        return "not made: the checkpoint's logits are not finite, even in float32"
    made = f"host, float32, edgevlm {bundle.manifest.edgevlm}"
    reference = recorded(reference, outcomes, made)
    if rounded is not None:
        reference = with_rounded(reference, _run(open_bundle(rounded), reference))
    write_reference(out, reference)
    return ""


def _run(bundle: Bundle, reference: Reference) -> list[Outcome]:
    executor = make_executor(bundle, None, None)
    try:
        runner = ModelRunner(bundle, executor)
        return [run_case(runner, case, executor) for case in reference.cases]
    finally:
        executor.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
