"""`edgevlm inspect`: what a bundle holds and what it will take, without loading it."""

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from edgevlm.bundle import Bundle, open_bundle
from edgevlm.commands.plan_report import human_bytes, plan_document, print_limits, print_plan
from edgevlm.commands.terminal import terminal


def execute(args: argparse.Namespace) -> dict[str, Any]:
    """Print the bundle's own account of itself."""
    bundle = open_bundle(args.bundle, check=False)  # sizes only: the digests are for loading
    if not args.json:
        print_bundle(terminal(), bundle)
    return document(bundle)


def document(bundle: Bundle) -> dict[str, Any]:
    """The plan stands under `plan` and, as `edgevlm plan` prints it, at the top."""
    manifest = bundle.manifest
    plan = plan_document(manifest.plan)
    return {
        "bundle": str(bundle.path),
        "edgevlm": manifest.edgevlm,
        "model_type": manifest.model.model_type,
        "target": manifest.target,
        "executor": manifest.executor,
        "lowering": manifest.lowering,
        "weights": manifest.weights,
        **plan,
        "plan": plan,
        "build": manifest.build,
        "kept_16bit": manifest.build.get("kept_16bit", []),
        "files": {name: record.bytes for name, record in manifest.files.items()},
    }


def print_bundle(console: Console, bundle: Bundle) -> None:
    """The same for people."""
    manifest = bundle.manifest
    console.print(
        f"{bundle.path}: {manifest.model.model_type}, weights {manifest.weights}, target "
        f"{manifest.target} (lowering {manifest.lowering}), built by edgevlm {manifest.edgevlm}"
    )
    print_plan(console, manifest.plan)
    print_limits(console, manifest.plan)
    engines = manifest.build.get("engines", {})
    if engines:
        console.print(_engines(engines))
    if manifest.pending is not None:
        console.print("scratch and peak are the compiler's: `edgevlm compile` fills them in")
    if peaks := manifest.build.get("peaks"):
        each = ", ".join(f"{name} {human_bytes(peak)}" for name, peak in peaks.items())
        console.print(f"peak memory of the build's processes: {each}")
    kept = manifest.build.get("kept_16bit", [])
    if kept:
        reasons = sorted({entry["reason"] for entry in kept})
        console.print(f"kept in 16 or 32 bits: {len(kept)} tensors ({'; '.join(reasons)})")


def _engines(engines: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, title="build", title_justify="left")
    table.add_column("part", no_wrap=True)
    for name in ("stages", "weights", "int4", "scratch", "seconds", "peak"):
        table.add_column(name, justify="right")
    for part, report in engines.items():
        table.add_row(
            part,
            str(len(report.get("stages", []))),
            *(_size(report.get(k)) for k in ("weights_bytes", "packed_int4_bytes")),
            _size(report.get("scratch_bytes")),
            f"{report['seconds']:.1f}" if "seconds" in report else "-",
            _size(report.get("peak_bytes")),
        )
    return table


def _size(nbytes: Any) -> str:
    return human_bytes(nbytes) if isinstance(nbytes, int) else "-"
