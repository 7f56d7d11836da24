"""`edgevlm compile`: finishes on the board a bundle that was prepared elsewhere.

Graphs go in, engines come out, and the bundle changes all at once or not at all. It needs no
checkpoint, no torch, no onnx: TensorRT itself reads the graphs.
"""

import argparse
import dataclasses
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from builders.engine import (
    REPORTS,
    Compiler,
    Profile,
    Stage,
    compile_stages,
    remove_reports,
    stage_progress,
)
from builders.publish import KEY, LOCK, building
from builders.report import built_on, figures, reported_plan
from builders.room import require_room
from builders.run_check import can_run, check_bundle
from edgevlm.bundle import (
    MANIFEST,
    Bundle,
    Manifest,
    Pending,
    PendingStage,
    data_file,
    open_bundle,
    record,
    write_manifest,
)
from edgevlm.checks import bundle_checks, require
from edgevlm.commands.arguments import json_flag
from edgevlm.commands.inspect import document, print_bundle
from edgevlm.commands.progress import BuildProgress
from edgevlm.commands.terminal import terminal
from edgevlm.device import Machine, read_machine
from edgevlm.errors import BuildError, OverBudget

Tell = Callable[[str, int, int], None]
PARTS: tuple[Literal["llm", "vision"], ...] = ("llm", "vision")


def arguments(parser: argparse.ArgumentParser) -> None:
    """`edgevlm compile`."""
    parser.add_argument("bundle", type=Path, help="a bundle prepared by `edgevlm build`")
    parser.add_argument("--keep-onnx", action="store_true", help="keep the graphs in the bundle")
    parser.add_argument("--force", action="store_true", help="go on where memory looks short")
    json_flag(parser, "what `edgevlm inspect` prints")


def execute(args: argparse.Namespace) -> dict[str, Any]:
    """Compile, with progress."""
    with BuildProgress() as progress:
        bundle = compile_bundle(
            args.bundle, keep_onnx=args.keep_onnx, force=args.force, progress=progress
        )
    if not args.json:
        print_bundle(terminal(), bundle)
    return document(bundle)


def compile_bundle(
    path: str | Path,
    *,
    keep_onnx: bool = False,
    force: bool = False,
    progress: Tell | None = None,
    machine: Machine | None = None,
) -> Bundle:
    """Compile a prepared bundle in its place. Raises BundleError, BuildError.

    After a failure the bundle is as it was, and the next call goes on after the last stage done.
    """
    tell = progress or (lambda what, done, total: None)
    machine = machine or read_machine()
    tell("reading", 0, 1)
    path = Path(path).resolve()
    manifest = open_bundle(path).manifest
    pending = manifest.pending
    if pending is None:
        raise BuildError(f"{path} is compiled already; build it again to change it")
    lowering = [c for c in bundle_checks(manifest, machine) if c.name == "bundle lowering"]
    require(lowering)
    if not force:
        require_room(max(stage.bytes for stage in pending.stages), machine)
    tell("reading", 1, 1)
    key = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    with building(path, key, force=True, resumable=_has_engines) as directory:
        _carry_over(path, directory, manifest, pending, keep_onnx)
        made = _compile(path, directory, manifest, pending, tell)
        done = _finished(manifest, pending, directory, made, machine)
        write_manifest(directory, done)
        if can_run(done, machine):
            tell("checking", 0, 1)
            done.build["self_check"] = check_bundle(directory)
            write_manifest(directory, done)
            tell("checking", 1, 1)
        remove_reports(directory)
    return open_bundle(path, check=False)


def _has_engines(directory: Path) -> bool:
    return any(directory.glob("*.engine"))


def _graphs(pending: Pending) -> set[str]:
    names = {stage.graph for stage in pending.stages}
    return names | {data_file(Path(name)).name for name in names}


def _carry_over(
    path: Path, directory: Path, manifest: Manifest, pending: Pending, keep_onnx: bool
) -> None:
    """All files that stay, under second names where the file system can: they take no room."""
    left_out = set() if keep_onnx else _graphs(pending)
    for name in manifest.files:
        target = directory / name
        if name in left_out or target.exists():
            continue
        try:
            os.link(path / name, target)
        except OSError:
            shutil.copyfile(path / name, target)


def _compile(
    path: Path, directory: Path, manifest: Manifest, pending: Pending, tell: Tell
) -> dict[str, dict[str, Any]]:
    """Every stage in a child process of its own; the figures by part."""
    if pending.compiler not in ("tensorrt", "tensorrt-rtx"):
        raise BuildError(f"this edgevlm has no compiler {pending.compiler!r}; update it")
    compiler = _compiler(pending)
    engines: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        stages = [stage for stage in pending.stages if stage.part == part]
        if not stages:
            continue
        ends = list(itertools.accumulate(stage.bytes for stage in stages))
        reports = compile_stages(
            [_stage(path, directory, stage) for stage in stages],
            compiler,
            stage_progress(f"compiling {part}", ends, tell),
        )
        prepared = manifest.build.get("engines", {}).get(part, {})
        engines[part] = figures(reports, prepared.get("packed_int4_bytes", 0))
    return engines


def _compiler(pending: Pending) -> Compiler:
    name: Literal["tensorrt", "tensorrt-rtx"] = (
        "tensorrt" if pending.compiler == "tensorrt" else "tensorrt-rtx"
    )
    return Compiler(name, pending.compute_capability, pending.workspace)


def _stage(path: Path, directory: Path, stage: PendingStage) -> Stage:
    profiles = tuple(Profile(name, dims) for name, dims in stage.profiles.items())
    return Stage(Path(stage.graph).stem, path / stage.graph, directory / stage.engine, profiles)


def _finished(
    manifest: Manifest,
    pending: Pending,
    directory: Path,
    engines: dict[str, dict[str, Any]],
    machine: Machine,
) -> Manifest:
    """The manifest of the compiled bundle, with the compiler's figures in the plan."""
    plan = reported_plan(manifest.plan, engines)
    if plan.fits is False:
        raise OverBudget(
            f"compiled, the bundle needs {plan.total_bytes:,} bytes and its budget is "
            f"{plan.budget_bytes:,}; prepare it again with smaller limits"
        )
    passing = {KEY, LOCK, MANIFEST, *(p.name for p in directory.glob(REPORTS))}
    kept = manifest.files
    files = {
        p.name: kept[p.name] if p.name in kept else record(p)
        for p in sorted(directory.iterdir())
        if p.is_file() and p.name not in passing
    }
    return dataclasses.replace(
        manifest,
        plan=plan,
        build={**manifest.build, "engines": engines},
        files=files,
        built_on=built_on(_compiler(pending), engines, machine),
        pending=None,
    )
