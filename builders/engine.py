"""Compiles graphs into engines, a child process each, so that the memory of one stage goes back
before the next begins and a killed build goes on after the last finished stage.

It knows files, dims and figures; no model, and no vendor library (compile_child.py has that).
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from builders.room import STAGE_BYTES as STAGE_BYTES
from edgevlm.bundle import TIMING_CACHE, data_file
from edgevlm.config import from_dict, to_dict
from edgevlm.device import read_machine
from edgevlm.errors import BuildError

CompilerName = Literal["tensorrt", "tensorrt-rtx"]
PACKAGES: dict[str, tuple[str, ...]] = {
    "tensorrt": ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
    "tensorrt-rtx": ("tensorrt-rtx", "tensorrt-rtx-cu12", "tensorrt-rtx-cu13"),
}
INSTALL = {
    "tensorrt": "on a Jetson, `edgevlm doctor` says how",
    "tensorrt-rtx": "pip install 'edgevlm[rtx]'",
}
REPORTS = "*.engine.json"
RECIPE = 2  # raise it when compile_child.py would make another engine from the same graph

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Profile:
    """One optimization profile: the range (min, opt, max) of every dim name of the graph."""

    name: str
    dims: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Compiler:
    """What compiles, and for which GPU (None: the one that is here).

    `workspace`: bytes of scratch that one layer may have; None: the compiler's own choice.
    """

    name: CompilerName = "tensorrt-rtx"
    compute_capability: str | None = "SM86"
    workspace: int | None = None


@dataclass(frozen=True)
class Stage:
    """One graph to compile.

    With `write` the graph is written just before it is compiled and removed after; `key` then
    names what it is written from, so that a finished stage is known without writing it again.
    """

    name: str
    onnx: Path
    engine: Path
    profiles: tuple[Profile, ...]
    write: Callable[[], object] | None = None
    key: str | None = None


@dataclass(frozen=True)
class StageReport:
    """What the compiler said of one stage; `scratch_bytes` by profile."""

    name: str
    key: str
    compiler: str
    weights_bytes: int
    plan_bytes: int
    scratch_bytes: dict[str, int]
    layers: dict[str, int]
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class StageProgress:
    """Told before ("started") and after ("finished", or "kept" from an earlier run) each stage."""

    name: str
    number: int  # from 1
    count: int
    state: Literal["started", "finished", "kept"]
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class StagePlan:
    """Layers [first_layer, end_layer) and perhaps the head, as one engine."""

    first_layer: int
    end_layer: int
    head: bool
    bytes: int


def prefill_profile(chunk: int) -> Profile:
    """One sequence, up to a chunk of tokens."""
    return Profile("prefill", {"batch_size": (1, 1, 1), "sequence_length": (1, chunk, chunk)})


def decode_profile(slots: int) -> Profile:
    """One token each for up to all slots."""
    return Profile("decode", {"batch_size": (1, slots, slots), "sequence_length": (1, 1, 1)})


def vision_profile(max_patches: int, max_windows: int = 0, merge: int = 4) -> Profile:
    """From one image token (`merge` patches) to the largest image; windows where there are any."""
    dims = {"num_patches": (merge, max_patches, max_patches)}
    if max_windows:
        dims["num_windows"] = (1, max_windows, max_windows)
    return Profile("vision", dims)


def plan_stages(
    layer_bytes: Sequence[int], head_bytes: int, limit: int = STAGE_BYTES
) -> tuple[StagePlan, ...]:
    """Whole layers in as few stages as `limit` allows, then as even as that number allows.

    The head shares the last stage where it fits there. Raises BuildError.
    """
    pieces = [*layer_bytes, head_bytes]
    largest = max(range(len(pieces)), key=lambda i: pieces[i])
    if pieces[largest] > limit:
        what = "the head" if largest == len(layer_bytes) else f"layer {largest}"
        raise BuildError(
            f"{what} alone has {pieces[largest]:,} bytes of weights, a stage may have {limit:,}; "
            "raise the stage limit or use --weights int4"
        )
    count = len(_fill(pieces, limit))
    low, high = pieces[largest], limit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(pieces, middle)) <= count else (middle + 1, high)
    layers = len(layer_bytes)
    return tuple(
        StagePlan(first, min(end, layers), end > layers, sum(pieces[first:end]))
        for first, end in _fill(pieces, low)
    )


def _fill(pieces: Sequence[int], limit: int) -> list[tuple[int, int]]:
    spans, first, total = [], 0, 0
    for i, size in enumerate(pieces):
        if total + size > limit and i > first:
            spans.append((first, i))
            first, total = i, 0
        total += size
    return [*spans, (first, len(pieces))]


def compiler_version(compiler: CompilerName) -> str:
    """Version of the installed compiler, without importing it. Raises BuildError."""
    for package in PACKAGES[compiler]:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # A source build of TensorRT, and Yocto's, leave no metadata; its libraries have a version.
    version = read_machine().libraries.tensorrt if compiler == "tensorrt" else None
    if version is None:
        raise BuildError(f"{compiler} is not installed here; {INSTALL[compiler]}")
    return version


def compile_stages(
    stages: Sequence[Stage],
    compiler: Compiler,
    progress: Callable[[StageProgress], None] | None = None,
) -> tuple[StageReport, ...]:
    """Compile the stages one after the other, keeping those that an earlier run finished.

    Raises BuildError; what was finished before stays, and the next call goes on from there.
    """
    tell = progress or (lambda _: None)
    reports: list[StageReport] = []
    for number, stage in enumerate(stages, 1):
        report = finished_report(stage, compiler)
        state: Literal["kept", "finished"] = "kept"
        if report is None:
            tell(StageProgress(stage.name, number, len(stages), "started"))
            report = _write_and_compile(stage, compiler)
            state = "finished"
        else:
            logger.info("%s was compiled by an earlier run; kept", stage.name)
        reports.append(report)
        figures = (report.plan_bytes, report.seconds)
        tell(StageProgress(stage.name, number, len(stages), state, *figures))
    return tuple(reports)


def stage_progress(
    what: str, ends: Sequence[int], tell: Callable[[str, int, int], None]
) -> Callable[[StageProgress], None]:
    """Stages as bytes of weights: `ends` are those of all stages up to each."""

    def progress(p: StageProgress) -> None:
        done = p.number - (p.state == "started")
        tell(what, ends[done - 1] if done else 0, ends[-1])

    return progress


def compile_stage(
    onnx: Path,
    profiles: Sequence[Profile],
    engine: Path,
    *,
    compiler: Compiler,
    name: str | None = None,
    key: str | None = None,
) -> StageReport:
    """Compile one graph in a child process. The engine appears whole or not at all.

    Raises BuildError with the compiler's own words.
    """
    name = name or engine.stem
    for file in graph_files(onnx):
        if not file.is_file():
            raise BuildError(f"{name} cannot be compiled: {file} is missing; build it again")
    _check_profiles(name, profiles)
    key = key or stage_key(onnx_digest(onnx), profiles, compiler)
    report_file(engine).unlink(missing_ok=True)
    part = engine.with_name(engine.name + ".part")
    engine.parent.mkdir(parents=True, exist_ok=True)
    job = {
        "onnx": str(onnx.resolve()),
        "out": str(part.resolve()),
        "compiler": compiler.name,
        "compute_capability": compiler.compute_capability,
        "workspace": compiler.workspace,
        "timing_cache": str(engine.with_name(TIMING_CACHE).resolve()),
        "profiles": [{"name": p.name, "dims": dict(p.dims)} for p in profiles],
        "parent": os.getpid(),
    }
    try:
        answer = _run_child(name, job)
        report = StageReport(name=name, key=key, **answer)
        os.replace(part, engine)
    finally:
        part.unlink(missing_ok=True)
    _write_report(engine, report)
    return report


def report_file(engine: Path) -> Path:
    """Where the report of an engine lies: beside it, named after it."""
    return engine.with_name(engine.name + ".json")


def remove_reports(directory: Path) -> None:
    """When all is done and checked: until then they are what a later run goes on from."""
    for path in directory.glob(REPORTS):
        path.unlink()


def finished_report(stage: Stage, compiler: Compiler) -> StageReport | None:
    """The report that an earlier run left for exactly this stage, if its engine is there too."""
    try:
        data = json.loads(report_file(stage.engine).read_text(encoding="utf-8"))
        report = from_dict(StageReport, data)
        if stage.engine.stat().st_size != report.plan_bytes:
            return None
    except (OSError, ValueError):
        return None
    if stage.key is None and not all(file.is_file() for file in graph_files(stage.onnx)):
        return None
    source = stage.key or onnx_digest(stage.onnx)
    return report if report.key == stage_key(source, stage.profiles, compiler) else None


def stage_key(source: str, profiles: Iterable[Profile], compiler: Compiler) -> str:
    """Hash of all that decides an engine: the graph (or what it is made from), and how."""
    facts = {
        "source": source,
        "profiles": [[p.name, sorted(p.dims.items())] for p in profiles],
        "compiler": [compiler.name, compiler_version(compiler.name)],
        "compute_capability": compiler.compute_capability,
        "workspace": compiler.workspace,
        "recipe": RECIPE,
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def onnx_digest(onnx: Path) -> str:
    """Hash of a graph and its weights."""
    digest = hashlib.sha256()
    for path in graph_files(onnx):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def graph_files(onnx: Path) -> tuple[Path, Path]:
    """A graph and its weights, which `Graph` always writes beside it."""
    return onnx, data_file(onnx)


def _write_and_compile(stage: Stage, compiler: Compiler) -> StageReport:
    if stage.write is not None:
        stage.onnx.parent.mkdir(parents=True, exist_ok=True)
        stage.write()
    key = None if stage.key is None else stage_key(stage.key, stage.profiles, compiler)
    try:
        return compile_stage(
            stage.onnx, stage.profiles, stage.engine, compiler=compiler, name=stage.name, key=key
        )
    finally:
        if stage.write is not None:
            for file in graph_files(stage.onnx):
                file.unlink(missing_ok=True)


def _check_profiles(name: str, profiles: Sequence[Profile]) -> None:
    if not profiles:
        raise BuildError(f"{name} has no optimization profile; give at least one")
    for profile in profiles:
        for dim, (low, usual, high) in profile.dims.items():
            if not 1 <= low <= usual <= high:
                raise BuildError(
                    f"{name}: profile {profile.name} gives {dim} the range "
                    f"{low}..{usual}..{high}; it must rise from 1 on"
                )


def _run_child(name: str, job: dict[str, Any]) -> dict[str, Any]:
    # a fresh interpreter from this source tree, whatever directory the build runs in
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-m", "builders.compile_child"]
    with tempfile.TemporaryFile() as words:
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            env={**os.environ, "PYTHONPATH": path},
        ) as child:
            try:
                answer, _ = child.communicate(json.dumps(job).encode() + b"\n")
            except BaseException:  # Ctrl-C: leave no compiler behind
                child.kill()
                raise
        if child.returncode < 0:
            raise BuildError(_killed(name, -child.returncode))
        try:
            result: dict[str, Any] = json.loads(answer)
        except ValueError:
            result = {"error": _tail(words) or f"it ended with code {child.returncode}"}
    if "error" in result:
        raise BuildError(f"{name} was not compiled: {job['compiler']} says: {result['error']}")
    return result


def _killed(name: str, number: int) -> str:
    text = f"compiling {name} was stopped by signal {number} ({signal.Signals(number).name})"
    if number != signal.SIGKILL:
        return f"{text}; run the build again: finished stages are kept"
    return (
        f"{text}, most likely because memory ran out; close other programs, add swap or lower the "
        "stage limit, then run the build again: finished stages are kept"
    )


def _tail(words: IO[bytes], lines: int = 5) -> str:
    words.seek(0)
    return " | ".join(words.read().decode("utf-8", "replace").strip().splitlines()[-lines:])


def _write_report(engine: Path, report: StageReport) -> None:
    path = report_file(engine)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(to_dict(report), indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
