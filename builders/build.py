"""A checkpoint becomes a bundle: read, plan, write graphs, compile, check, publish.

It puts the other builders in order and owns the options; the work is theirs.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from builders.blocks import Lowering, WeightPolicy
from builders.checkpoint import Checkpoint
from builders.decoder import write_embedding_table
from builders.limits import BuildOptions as BuildOptions
from builders.limits import budget_of, make_plan
from builders.limits import check_budget as check_budget
from builders.phases import Built, Work, build_phases
from builders.planner import with_report
from builders.publish import KEY, LOCK, building
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
from edgevlm.errors import BuildError
from edgevlm.memory_plan import MemoryPlan, PoolName
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
        built = build_phases(_work(prepared, directory, identity), tell)
        manifest = _manifest(prepared, built, directory, special_tokens, start)
        write_manifest(directory, manifest)
        if prepared.target.executor == "host":
            tell("checking", 0, 1)
            manifest.build["self_check"] = check_bundle(directory)
            write_manifest(directory, manifest)
            tell("checking", 1, 1)
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
) -> Manifest:
    ledger = prepared.plan
    if built.scratch_bytes is not None:
        reported: dict[PoolName, tuple[int, str]] = {
            "activations": (built.scratch_bytes, "largest scratch of any stage and profile"),
        }
        names: tuple[tuple[PoolName, str], ...] = (
            ("weights.llm", "llm"),
            ("weights.vision", "vision"),
        )
        for pool, engine in names:
            if engine in built.engines:
                weights = built.engines[engine]["weights_bytes"]
                reported[pool] = (weights, "sum over stages")
        ledger = with_report(ledger, reported)
        check_budget(ledger)
    written = sorted(p for p in directory.iterdir() if p.is_file() and p.name not in (KEY, LOCK))
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
            "peak_rss_bytes": peak_rss_bytes(),
        },
        files={p.name: record(p) for p in written if p.name != MANIFEST},
    )


def check_bundle(directory: Path) -> dict[str, int]:
    """Run the bundle once in a process of its own; a bundle that cannot answer is not published.

    Returns what it saw: allocations_after_start, planned_bytes and peak_rss_bytes.
    """
    command = [sys.executable, "-m", "builders.self_check", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        words = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
        raise BuildError(f"the bundle was built but does not run: {words}")
    memory: dict[str, int] = json.loads(result.stdout)
    return memory
