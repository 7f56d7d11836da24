"""Runs a bundle once in a process of its own: to make a reference, or to hold it against one.

`record` writes what bundles say as the reference; `verify` answers with all that was found.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np

from edgevlm.bundle import Bundle, open_bundle
from edgevlm.config import to_dict
from edgevlm.errors import EdgeVLMError
from edgevlm.executors.base import Executor
from edgevlm.reference import Reference, read_reference, write_reference
from edgevlm.runner import ModelRunner
from edgevlm.verify import Outcome, recorded, run_case, verify, with_rounded
from edgevlm.vlm import make_executor, peak_rss_bytes


def main(arguments: list[str]) -> int:
    """Exit code 0, or 1 with one line on stderr."""
    try:
        if arguments[0] == "record":
            reason = _record(int(arguments[1]), *map(Path, arguments[2:]))
            text = json.dumps({"reason": reason, "peak_rss_bytes": peak_rss_bytes()})
        else:
            found = verify(arguments[1], make=_lean)
            checks = [to_dict(check) for check in found.checks]
            text = json.dumps({"checks": checks, "figures": found.figures})
    except EdgeVLMError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(text + "\n")
    return 0


def _lean(bundle: Bundle, executor: str | None, threads: int | None) -> Executor:
    """The bundle's executor; on the host without the pages that the fixed prompts do not need."""
    if bundle.manifest.executor != "host":
        return make_executor(bundle, executor, threads)
    host = importlib.import_module("edgevlm.executors.host")
    lean: Executor = host.HostExecutor(bundle, threads, touch=False)
    return lean


def _record(resident: int, out: Path, whole: Path, rounded: Path | None = None) -> str | None:
    """Write `out`, keeping `resident` bytes of stages loaded; what stands against it, or None."""
    bundle = open_bundle(whole)
    reference = read_reference(bundle)
    outcomes = _run(bundle, reference, resident)
    if not all(np.isfinite(outcome.logits).all() for outcome in outcomes):
        return "not made: the checkpoint's logits are not finite, even in float32"
    made = f"host, float32, edgevlm {bundle.manifest.edgevlm}"
    reference = recorded(reference, outcomes, made)
    if rounded is not None:
        reference = with_rounded(reference, _run(open_bundle(rounded), reference, resident))
    write_reference(out, reference)
    return None


def _run(bundle: Bundle, reference: Reference, resident: int) -> list[Outcome]:
    # Not at the top: a board's build verifies, and has no ONNX Runtime.
    streamed = importlib.import_module("builders.streamed")
    executor: Executor = streamed.StreamedExecutor(bundle, resident)
    try:
        runner = ModelRunner(bundle, executor)
        return [run_case(runner, case, executor) for case in reference.cases]
    finally:
        executor.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
