"""Writes the graphs of a bundle and, where the target has a compiler, compiles them.

Knows what each phase is made of and the figures it leaves behind; no weights, no operators.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builders.blocks import Lowering, WeightPolicy
from builders.decoder import GraphFile, TextPart, text_border, text_graph
from builders.engine import StageProgress, StageReport, compile_stages, report_file
from builders.planner import kept_16bit, packed_int4_bytes
from builders.qwen_tower import VisionPart, vision_border, vision_graph
from builders.stages import PlannedStage, StageSource, text_stages, vision_stages
from builders.targets import Target
from builders.weights import WeightSource
from edgevlm.bundle import LLM_GRAPH, VISION_GRAPH, StageSpec
from edgevlm.config import Limits, ModelConfig

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


def build_phases(work: Work, tell: Tell) -> Built:
    """Write, and compile if need be, the language model and the tower."""
    made = (_compile if work.target.compiler else _write)(work, tell)
    phases: dict[str, tuple[StageSpec, ...]] = {}
    for engine, (stages, _) in made.items():
        for phase in ("prefill", "decode") if engine == "llm" else ("vision",):
            phases[phase] = stages
    engines = {engine: figures for engine, (_, figures) in made.items()}
    scratch = [figures["scratch_bytes"] for figures in engines.values()]
    return Built(
        phases=phases,
        engines=engines,
        kept_16bit=kept_16bit(work.model, work.policy),
        scratch_bytes=max(scratch) if work.target.compiler else None,
    )


Made = dict[str, tuple[tuple[StageSpec, ...], dict[str, Any]]]


def _write(work: Work, tell: Tell) -> Made:
    """One graph each, as it is: the executor takes ONNX."""
    made: Made = {}
    writers: dict[str, Callable[[], GraphFile]] = {
        "llm": lambda: text_graph(
            work.lowering,
            work.source,
            work.model.text,
            work.limits,
            work.policy,
            work.directory / LLM_GRAPH,
        )
    }
    if (vision := work.model.vision) is not None:
        path = work.directory / VISION_GRAPH
        writers["vision"] = lambda: vision_graph(work.lowering, work.source, vision, path)
    for engine, write in writers.items():
        tell(f"writing {engine}", 0, 1)
        start = time.perf_counter()
        graph = write()
        figures: dict[str, Any] = {
            "weights_bytes": graph.weights.packed_int4 + graph.weights.floats,
            "packed_int4_bytes": graph.weights.packed_int4,
            "scratch_bytes": None,
            "seconds": round(time.perf_counter() - start, 2),
            "peak_bytes": None,
            "stages": [],
        }
        made[engine] = (StageSpec(graph.path.name, graph.inputs, graph.outputs),), figures
        tell(f"writing {engine}", 1, 1)
    return made


def _compile(work: Work, tell: Tell) -> Made:
    """Each stage is written, compiled in a child process, and its graph removed."""
    assert work.target.compiler is not None
    of = StageSource(
        work.source, work.model, work.limits, work.policy, work.lowering, work.identity
    )
    planned = {"llm": text_stages(of, work.directory), "vision": vision_stages(of, work.directory)}
    made: Made = {}
    for engine, stages in planned.items():
        if not stages:
            continue

        def progress(p: StageProgress) -> None:
            tell(f"compiling {p.name}", p.number - (p.state == "started"), p.count)

        reports = compile_stages([p.stage for p in stages], work.target.compiler, progress)
        made[engine] = (
            tuple(_spec(work, engine, p) for p in stages),
            _figures(reports, packed_int4_bytes(work.model, work.policy) if engine == "llm" else 0),
        )
    for stages in planned.values():
        for p in stages:  # only now: until all are done they are what a later run goes on from
            report_file(p.stage.engine).unlink()
    return made


def _spec(work: Work, engine: str, planned: PlannedStage) -> StageSpec:
    plan = planned.plan
    if engine == "llm":
        part = TextPart(plan.first_layer, plan.end_layer, plan.head)
        inputs, outputs = text_border(work.lowering, work.model.text, work.limits, part)
    else:
        assert work.model.vision is not None
        vision_part = VisionPart(plan.first_layer, plan.end_layer)
        inputs, outputs = vision_border(work.lowering, work.model.vision, vision_part)
    return StageSpec(planned.stage.engine.name, inputs, outputs)


def _figures(reports: Sequence[StageReport], packed_int4: int) -> dict[str, Any]:
    """Sums and maxima over stages."""
    return {
        "weights_bytes": sum(r.weights_bytes for r in reports),
        "packed_int4_bytes": packed_int4,
        "scratch_bytes": max(max(r.scratch_bytes.values()) for r in reports),
        "seconds": round(sum(r.seconds for r in reports), 2),
        "peak_bytes": max(r.peak_bytes for r in reports),
        "stages": [asdict(r) for r in reports],
    }
