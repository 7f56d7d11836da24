"""Writes the graphs of a bundle and, where the target has a compiler, compiles them.

Knows the order of stages and what each leaves behind; no weights, no operators.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builders.blocks import Lowering, WeightPolicy
from builders.decoder import GraphFile, TextPart, text_graph
from builders.engine import (
    Profile,
    Stage,
    StageProgress,
    StageReport,
    compile_stages,
    decode_profile,
    prefill_profile,
    report_file,
    vision_profile,
)
from builders.graph import WeightBytes
from builders.planner import text_parts, tower_windows, vision_parts
from builders.qwen_tower import VisionPart, vision_graph
from builders.targets import Target
from builders.weights import WeightSource
from edgevlm.bundle import LLM_GRAPH, VISION_GRAPH, StageSpec
from edgevlm.config import Limits, ModelConfig
from edgevlm.preprocess import max_patches

Tell = Callable[[str, int, int], None]  # what, done, of how many


@dataclass(frozen=True)
class Work:
    """What is built, for what, and where."""

    source: WeightSource
    model: ModelConfig
    limits: Limits
    lowering: Lowering
    policy: WeightPolicy
    target: Target
    directory: Path
    identity: str  # of the checkpoint's files: a stage compiled from others is not reused


@dataclass(frozen=True)
class Built:
    """The stages of each phase, and figures for the report by engine ("llm", "vision")."""

    phases: dict[str, tuple[StageSpec, ...]]
    engines: dict[str, dict[str, Any]]
    kept_16bit: list[dict[str, str]]
    scratch_bytes: int | None  # as the compiler reported it; None where nothing was compiled


@dataclass(frozen=True)
class _Part:
    """One graph file to be: how to write it, and what its engine is called."""

    name: str
    write: Callable[[Path], GraphFile]


def build_phases(work: Work, tell: Tell) -> Built:
    """Write, and compile if need be, the language model and the tower."""
    parts = {"llm": _llm_parts(work), "vision": _vision_parts(work)}
    make = _compile if work.target.compiler else _write
    phases: dict[str, tuple[StageSpec, ...]] = {}
    engines: dict[str, dict[str, Any]] = {}
    kept: list[dict[str, str]] = []
    scratch: int | None = None
    for engine in ("llm", "vision"):
        if not parts[engine]:
            continue
        stages, weights, figures = make(work, engine, parts[engine], tell)
        for phase in ("prefill", "decode") if engine == "llm" else ("vision",):
            phases[phase] = stages
        engines[engine] = figures
        kept += [dataclasses.asdict(k) for w in weights for k in w.kept_16bit]
        if work.target.compiler:
            scratch = max(scratch or 0, figures["scratch_bytes"])
    return Built(phases, engines, kept + _always_16bit(work), scratch)


def _llm_parts(work: Work) -> list[_Part]:
    def writer(part: TextPart) -> Callable[[Path], GraphFile]:
        text, limits = work.model.text, work.limits
        return lambda path: text_graph(
            work.lowering, work.source, text, limits, work.policy, path, part
        )

    if work.target.compiler is None:
        parts = [TextPart(0, work.model.text.num_hidden_layers, True)]
    else:
        parts = text_parts(work.model, work.policy)
    return [_Part(_file_name(LLM_GRAPH, i, len(parts)), writer(p)) for i, p in enumerate(parts)]


def _vision_parts(work: Work) -> list[_Part]:
    vision = work.model.vision
    if vision is None:
        return []

    def writer(part: VisionPart) -> Callable[[Path], GraphFile]:
        return lambda path: vision_graph(work.lowering, work.source, vision, path, part)

    if work.target.compiler is None:
        parts = [VisionPart(0, vision.depth)]
    else:
        parts = vision_parts(work.model)
    return [_Part(_file_name(VISION_GRAPH, i, len(parts)), writer(p)) for i, p in enumerate(parts)]


def _file_name(name: str, number: int, count: int) -> str:
    """llm.onnx, or llm.0.onnx, llm.1.onnx, ... where there are several."""
    stem, _, suffix = name.partition(".")
    return name if count == 1 else f"{stem}.{number}.{suffix}"


def _write(
    work: Work, engine: str, parts: Sequence[_Part], tell: Tell
) -> tuple[tuple[StageSpec, ...], list[WeightBytes], dict[str, Any]]:
    """Graphs as they are: the executor takes ONNX."""
    start = time.perf_counter()
    graphs = []
    for number, part in enumerate(parts):
        tell(f"writing {engine}", number, len(parts))
        graphs.append(part.write(work.directory / part.name))
    tell(f"writing {engine}", len(parts), len(parts))
    weights = [graph.weights for graph in graphs]
    figures: dict[str, Any] = {
        "weights_bytes": sum(w.packed_int4 + w.floats for w in weights),
        "packed_int4_bytes": sum(w.packed_int4 for w in weights),
        "scratch_bytes": None,
        "seconds": round(time.perf_counter() - start, 2),
        "peak_bytes": None,
        "stages": [],
    }
    stages = tuple(StageSpec(g.path.name, g.inputs, g.outputs) for g in graphs)
    return stages, weights, figures


def _compile(
    work: Work, engine: str, parts: Sequence[_Part], tell: Tell
) -> tuple[tuple[StageSpec, ...], list[WeightBytes], dict[str, Any]]:
    """Each graph is written, compiled in a child process, and removed."""
    compiler = work.target.compiler
    assert compiler is not None
    graphs: dict[str, GraphFile] = {}
    stages = []
    for part in parts:
        onnx = work.directory / part.name
        name = onnx.stem

        def write(part: _Part = part, onnx: Path = onnx) -> None:
            graphs[part.name] = part.write(onnx)

        stages.append(
            Stage(
                name=name,
                onnx=onnx,
                engine=onnx.with_suffix(".engine"),
                profiles=_profiles(work, engine),
                write=write,
                key=_key(work, part.name, len(parts)),
            )
        )

    def progress(p: StageProgress) -> None:
        done = p.number - (p.state == "started")
        tell(f"compiling {p.name}", done, p.count)

    reports = compile_stages(stages, compiler, progress)
    for stage, part in zip(stages, parts, strict=True):
        if part.name not in graphs:  # its engine was kept; its border is needed all the same
            graphs[part.name] = part.write(stage.onnx)
            stage.onnx.unlink()
            stage.onnx.with_name(stage.onnx.name + ".data").unlink(missing_ok=True)
        report_file(stage.engine).unlink(missing_ok=True)
    weights = [graphs[part.name].weights for part in parts]
    specs = tuple(
        StageSpec(stage.engine.name, graphs[part.name].inputs, graphs[part.name].outputs)
        for stage, part in zip(stages, parts, strict=True)
    )
    return specs, weights, _compiled_figures(reports, weights)


def _compiled_figures(reports: Sequence[StageReport], weights: list[WeightBytes]) -> dict[str, Any]:
    return {
        "weights_bytes": sum(r.weights_bytes for r in reports),
        "packed_int4_bytes": sum(w.packed_int4 for w in weights),
        "scratch_bytes": max(max(r.scratch_bytes.values()) for r in reports),
        "seconds": round(sum(r.seconds for r in reports), 2),
        "peak_bytes": max(r.peak_bytes for r in reports),
        "stages": [dataclasses.asdict(r) for r in reports],
    }


def _profiles(work: Work, engine: str) -> tuple[Profile, ...]:
    if engine == "llm":
        return prefill_profile(work.limits.max_prefill_chunk), decode_profile(work.limits.slots)
    vision, processor = work.model.vision, work.model.image_processor
    assert vision is not None and processor is not None
    merge = vision.spatial_merge_size**2
    return (vision_profile(max_patches(processor), tower_windows(work.model), merge),)


def _key(work: Work, name: str, count: int) -> str:
    """Names everything a stage is written from."""
    facts = (
        work.identity,
        work.model,
        work.limits,
        work.lowering.name,
        work.policy,
        name,
        count,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _always_16bit(work: Work) -> list[dict[str, str]]:
    """What no policy quantises."""
    kept = [
        {"name": "model.embed_tokens.weight", "reason": "rows are looked up, not multiplied"},
    ]
    if work.model.vision is not None:
        kept.append({"name": "visual.*", "reason": "vision features carry small text and edges"})
    return kept
