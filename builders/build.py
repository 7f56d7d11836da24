"""A checkpoint becomes a bundle: read, plan, write graphs, compile, check, publish.

It puts the other builders in order and owns the options; the work is theirs.
"""

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from builders.blocks import Lowering, WeightPolicy
from builders.checkpoint import Checkpoint
from builders.decoder import write_embedding_table
from builders.engine import REPORTS, remove_reports
from builders.limits import BuildOptions as BuildOptions
from builders.limits import budget_of, make_plan
from builders.limits import check_budget as check_budget
from builders.phases import Built, Work, build_phases
from builders.planner import text_stage_plans, vision_stage_plans
from builders.publish import KEY, LOCK, building
from builders.reference import Setting, make_reference
from builders.report import built_on, compile_peak, reported_plan
from builders.room import require_room
from builders.run_check import can_run, check_bundle
from builders.solver import Change
from builders.targets import Target, find_target, lowering_for
from edgevlm import __version__
from edgevlm.bundle import (
    CHAT_TEMPLATE,
    EMBEDDING_TABLE,
    FORMAT_VERSION,
    MANIFEST,
    TOKENIZER,
    Bundle,
    Manifest,
    embedding_dtype,
    open_bundle,
    record,
    write_manifest,
)
from edgevlm.config import ModelConfig, to_dict
from edgevlm.device import Machine, read_machine
from edgevlm.errors import BuildError
from edgevlm.memory_plan import MemoryPlan
from edgevlm.vlm import peak_rss_bytes

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


@dataclass(frozen=True)
class Prepared:
    """All that is decided before any work is done."""

    source: Checkpoint
    model: ModelConfig
    options: BuildOptions
    target: Target
    lowering: Lowering
    policy: WeightPolicy
    plan: MemoryPlan
    changes: tuple[Change, ...] = ()


def prepare(checkpoint: str | Path, options: BuildOptions) -> Prepared:
    """Read and check a checkpoint and make its plan. Raises BuildError; over budget is not one."""
    source = Checkpoint(checkpoint)
    target = find_target(options.target)
    lowering = lowering_for(target, options.lowering)
    made = make_plan(
        source.config,
        options,
        target,
        lowering.name,
        budget_of(options),
        len(source.tokenizer_json.encode()),
    )
    policy = WeightPolicy(options.weights, options.group_size)
    return Prepared(source, made.model, options, target, lowering, policy, made.plan, made.changes)


def build(
    checkpoint: str | Path,
    out: str | Path,
    options: BuildOptions,
    *,
    progress: Progress | None = None,
) -> Bundle:
    """Make a bundle. It appears whole under `out`, or not at all. Raises BuildError."""
    tell = progress or (lambda stage, done, total: None)
    out = Path(out)
    start = time.perf_counter()
    tell("reading", 0, 1)
    prepared = prepare(checkpoint, options)
    check_budget(prepared.plan, prepared.changes)
    machine = read_machine()
    _check_room(prepared, machine)
    tell("reading", 1, 1)
    identity = _identity(prepared.source)
    key = hashlib.sha256(repr((identity, options, __version__)).encode()).hexdigest()
    with building(out, key, force=options.force, resumable=_has_engines) as directory:
        _check_disk(prepared, directory)
        special_tokens = _write_text_side(prepared.source, directory)
        table = prepared.plan.pool("embedding_table").bytes
        tell("embedding table", 0, table)
        write_embedding_table(
            prepared.source, directory / EMBEDDING_TABLE, embedding_dtype(options.weights)
        )
        tell("embedding table", table, table)
        tell("reference", 0, 1)
        reference = make_reference(
            _setting(prepared, special_tokens, directory), machine, options.reference
        )
        tell("reference", 1, 1)
        built = build_phases(_work(prepared, directory, identity), tell)
        manifest = _manifest(prepared, built, directory, special_tokens, start, machine)
        manifest.build["reference"] = reference.reason or "made"
        peaks = {"reference": reference.peak_rss_bytes, "compiler": compile_peak(built.engines)}
        write_manifest(directory, manifest)
        if can_run(manifest, machine):
            tell("checking", 0, 1)
            found = manifest.build["self_check"] = check_bundle(directory)
            peaks["self_check"] = found["peak_rss_bytes"]
            tell("checking", 1, 1)
        peaks["builder"] = peak_rss_bytes()
        manifest.build["peaks"] = {name: peak for name, peak in peaks.items() if peak is not None}
        write_manifest(directory, manifest)
        remove_reports(directory)
    return open_bundle(out, check=False)


def _work(prepared: Prepared, directory: Path, identity: str) -> Work:
    return Work(
        source=prepared.source,
        model=prepared.model,
        limits=prepared.plan.limits,
        lowering=prepared.lowering,
        policy=prepared.policy,
        target=prepared.target,
        directory=directory,
        identity=identity,
        workspace=prepared.plan.pool("activations").bytes,
    )


def _check_room(prepared: Prepared, machine: Machine) -> None:
    """Refuse before the work what a compiler here would most likely be killed for."""
    target = prepared.target
    if target.compiler is None or not target.here or prepared.options.force:
        return
    plans = text_stage_plans(prepared.model, prepared.policy, target.stage_limit)
    plans += vision_stage_plans(prepared.model, target.stage_limit)
    require_room(max(plan.bytes for plan in plans), machine)


def _setting(prepared: Prepared, special_tokens: dict[str, str], directory: Path) -> Setting:
    return Setting(
        prepared.source,
        prepared.model,
        prepared.policy,
        prepared.plan.limits.max_seq_len,
        special_tokens,
        directory,
        prepared.target.executor == "host",
    )


def _identity(source: Checkpoint) -> str:
    """Changes when a file of the checkpoint does: names, sizes and times."""
    files = sorted(p for p in source.path.iterdir() if p.is_file())
    facts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(repr((str(source.path.resolve()), facts)).encode()).hexdigest()


def _has_engines(directory: Path) -> bool:
    return any(directory.glob("*.engine"))


def _check_disk(prepared: Prepared, directory: Path) -> None:
    """Refuse before the work where the bundle cannot fit the disk."""
    files = ("weights.llm", "weights.vision", "embedding_table")
    needed = sum(p.bytes for p in prepared.plan.pools if p.name in files)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise BuildError(
            f"the bundle needs about {needed:,} bytes of disk and {directory.parent} has {free:,} "
            "free; free some space or choose another place"
        )


def _write_text_side(source: Checkpoint, directory: Path) -> dict[str, str]:
    """Tokenizer and chat template; returns the template's variables."""
    (directory / TOKENIZER).write_text(source.tokenizer_json, encoding="utf-8")
    if source.chat_template is not None:
        (directory / CHAT_TEMPLATE).write_text(source.chat_template, encoding="utf-8")
    special = {}
    for name, token in source.tokenizer_config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            special[name] = content
    return special


def _manifest(
    prepared: Prepared,
    built: Built,
    directory: Path,
    special_tokens: dict[str, str],
    start: float,
    machine: Machine,
) -> Manifest:
    ledger = prepared.plan
    on = None
    if built.compiler is not None:
        ledger = reported_plan(ledger, built.engines)
        check_budget(ledger)
        on = built_on(built.compiler, built.engines, machine)
    passing = {KEY, LOCK, MANIFEST, *(p.name for p in directory.glob(REPORTS))}
    written = sorted(p for p in directory.iterdir() if p.is_file() and p.name not in passing)
    return Manifest(
        version=FORMAT_VERSION,
        edgevlm=__version__,
        target=prepared.target.name,
        executor=prepared.target.executor,
        lowering=prepared.lowering.name,
        weights=prepared.policy.weights,
        model=prepared.model,
        special_tokens=special_tokens,
        phases=built.phases,
        plan=ledger,
        build={
            "checkpoint": prepared.source.path.name,
            "checkpoint_bytes": prepared.source.bytes,
            "options": to_dict(prepared.options),
            "engines": built.engines,
            "kept_16bit": built.kept_16bit,
            "seconds": round(time.perf_counter() - start, 2),
        },
        files={p.name: record(p) for p in written},
        built_on=on,
        pending=built.pending,
    )
