"""A checkpoint becomes a bundle: read, plan, write graphs, compile, check, publish.

It puts the other builders in order and owns the options; the work is theirs.
"""

import dataclasses
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from builders.blocks import Lowering, WeightPolicy, WeightsName
from builders.checkpoint import Checkpoint
from builders.decoder import write_embedding_table
from builders.phases import Built, Work, build_phases
from builders.planner import plan, with_report
from builders.publish import KEY, LOCK, building
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
    open_bundle,
    record,
    write_manifest,
)
from edgevlm.config import Limits, ModelConfig, to_dict
from edgevlm.errors import BuildError, OverBudget
from edgevlm.memory_plan import MemoryPlan, PoolName
from edgevlm.vlm import peak_rss_bytes

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all

DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_MAX_PIXELS = 1280 * 28 * 28  # Qwen2-VL's own advice for everyday pictures
DEFAULT_MAX_IMAGES = 4
MIN_SEQ_LEN = 16


@dataclass(frozen=True)
class BuildOptions:
    """What a person decides about a build. None: as the model or the target has it."""

    target: str = "host"
    lowering: Literal["native", "classic"] | None = None
    weights: WeightsName = "int4"
    group_size: int = 128
    max_seq_len: int | None = None
    max_pixels: int | None = None
    max_images: int | None = None
    max_prefill_chunk: int = 256
    slots: int = 1
    memory_budget: int | None = None
    force: bool = False


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


def prepare(checkpoint: str | Path, options: BuildOptions) -> Prepared:
    """Read and check a checkpoint and make its plan. Raises BuildError; over budget is not one."""
    source = Checkpoint(checkpoint)
    target = find_target(options.target)
    lowering = lowering_for(target, options.lowering)
    limits = _limits(source.config, options)
    model = _capped(source.config, limits)
    policy = WeightPolicy(options.weights, options.group_size)
    ledger = plan(
        model,
        limits,
        policy,
        target,
        lowering.name,
        budget_bytes=options.memory_budget,
        tokenizer_bytes=len(source.tokenizer_json.encode()),
    )
    return Prepared(source, model, options, target, lowering, policy, ledger)


def check_budget(ledger: MemoryPlan) -> None:
    """Raise OverBudget with the figures where the plan needs more than it may."""
    if ledger.fits is not False:
        return
    assert ledger.budget_bytes is not None
    largest = max((p for p in ledger.pools if not p.reclaimable), key=lambda p: p.bytes)
    raise OverBudget(
        f"the plan needs {ledger.total_bytes:,} bytes and the budget is {ledger.budget_bytes:,}: "
        f"{ledger.total_bytes - ledger.budget_bytes:,} too many; the largest part is "
        f"{largest.name} ({largest.bytes:,}); lower --max-seq-len, --max-pixels or --slots"
    )


def _limits(model: ModelConfig, options: BuildOptions) -> Limits:
    """The limits of a bundle, each checked against what the model can do."""
    ceiling = model.text.max_position_embeddings
    wanted = options.max_seq_len
    if wanted is not None and not MIN_SEQ_LEN <= wanted <= ceiling:
        raise BuildError(
            f"--max-seq-len is {wanted:,}; this model takes from {MIN_SEQ_LEN} to {ceiling:,}"
        )
    max_seq_len = wanted or min(DEFAULT_MAX_SEQ_LEN, ceiling)
    for flag, value in (
        ("--slots", options.slots),
        ("--max-prefill-chunk", options.max_prefill_chunk),
    ):
        if value < 1:
            raise BuildError(f"{flag} is {value}; it must be at least 1")
    max_images, max_pixels = _image_limits(model, options)
    return Limits(
        max_seq_len=max_seq_len,
        max_prefill_chunk=min(options.max_prefill_chunk, max_seq_len),
        slots=options.slots,
        max_images=max_images,
        max_pixels=max_pixels,
    )


def _image_limits(model: ModelConfig, options: BuildOptions) -> tuple[int, int]:
    processor = model.image_processor
    if processor is None:
        if options.max_images or options.max_pixels:
            raise BuildError(
                f"{model.model_type} reads text only; leave --max-images and --max-pixels out"
            )
        return 0, 0
    images = DEFAULT_MAX_IMAGES if options.max_images is None else options.max_images
    if images < 1:
        raise BuildError(f"--max-images is {images}; it must be at least 1")
    pixels = options.max_pixels
    if pixels is None:
        pixels = min(DEFAULT_MAX_PIXELS, processor.max_pixels)
    if not processor.min_pixels <= pixels <= processor.max_pixels:
        raise BuildError(
            f"--max-pixels is {pixels:,}; this model takes from {processor.min_pixels:,} to "
            f"{processor.max_pixels:,}"
        )
    return images, pixels


def _capped(model: ModelConfig, limits: Limits) -> ModelConfig:
    """The model with its pictures capped at what was planned."""
    if model.image_processor is None:
        return model
    processor = dataclasses.replace(model.image_processor, max_pixels=limits.max_pixels)
    return dataclasses.replace(model, image_processor=processor)


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
    check_budget(prepared.plan)
    tell("reading", 1, 1)
    identity = _identity(prepared.source)
    key = hashlib.sha256(repr((identity, options, __version__)).encode()).hexdigest()
    with building(out, key, force=options.force, resumable=_has_engines) as directory:
        _check_disk(prepared, directory)
        special_tokens = _write_text_side(prepared.source, directory)
        tell("embedding table", 0, 1)
        write_embedding_table(prepared.source, directory / EMBEDDING_TABLE)
        tell("embedding table", 1, 1)
        built = build_phases(_work(prepared, directory, identity), tell)
        manifest = _manifest(prepared, built, directory, special_tokens, start)
        write_manifest(directory, manifest)
        if prepared.target.executor == "host":
            tell("checking", 0, 1)
            check_bundle(directory)
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


def check_bundle(directory: Path) -> None:
    """Run the bundle once in a process of its own; a bundle that cannot answer is not published."""
    command = [sys.executable, "-m", "builders.self_check", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        words = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
        raise BuildError(f"the bundle was built but does not run: {words}")
