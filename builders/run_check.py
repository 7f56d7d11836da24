"""Whether a bundle runs here as its checkpoint does; the last step before it is published."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from edgevlm.bundle import Manifest
from edgevlm.checks import bundle_checks
from edgevlm.device import Machine
from edgevlm.errors import BuildError


def can_run(manifest: Manifest, machine: Machine) -> bool:
    """Whether this machine has what the bundle's executor needs."""
    checks = {check.name: check.status for check in bundle_checks(manifest, machine)}
    return manifest.pending is None and checks["bundle executor"] == "ok"


def check_bundle(directory: Path) -> dict[str, Any]:
    """Verify the bundle in a process of its own; one that fails is not published.

    Returns the figures: allocations_after_start, planned_bytes, peak_rss_bytes, timings, cases,
    and the checks. Raises BuildError.
    """
    found: dict[str, Any] = json.loads(run_child("verify", directory))
    for check in found["checks"]:
        if check["status"] == "fail":
            raise BuildError(
                f"the bundle was built but does not run as its checkpoint does: {check['name']}: "
                f"found {check['found']}; needed {check['needed']}; {check['remedy']}"
            )
    return {**found["figures"], "checks": found["checks"]}


def run_child(*arguments: str | Path) -> str:
    """builders.self_check in a process of its own; what it printed. Raises BuildError."""
    command = [sys.executable, "-m", "builders.self_check", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        words = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
        raise BuildError(f"the bundle was built but does not run: {words}")
    return result.stdout
