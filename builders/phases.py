"""Writes the graphs of a bundle and, where the target has a compiler, compiles them.

Knows what each phase is made of and the figures it leaves behind; no weights, no operators.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builders.blocks import Lowering, WeightPolicy
from builders.decoder import EMBEDDING, GraphFile, TextPart, text_border, text_graph
from builders.engine import StageProgress, StageReport, compile_stages, report_file
from builders.planner import kept_16bit, packed_int4_bytes
from builders.qwen_tower import VisionPart, vision_border, vision_graph
from builders.stages import PlannedStage, StageSource, text_stages, vision_stages
from builders.targets import Target
from builders.weights import WeightSource
from edgevlm.bundle import LLM_GRAPH, VISION_GRAPH, StageSpec
from edgevlm.config import Limits, ModelConfig

Tell = Callable[[str, int, int], None]  # what, bytes done, bytes in all


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


class ReadingSource:
    """A weight source that tells how much of what a graph needs has been read, in fp32 bytes."""

    def __init__(self, source: WeightSource, stage: str, total: int, tell: Tell) -> None:
        self._source, self._stage, self._total, self._tell = source, stage, total, tell
        self._done = 0

    def names(self) -> Collection[str]:
        """As the source."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """As the source."""
        return self._source.shape(name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """As the source; told before, so that the last step is not told too early."""
        self._tell(self._stage, min(self._done, self._total), self._total)
        values = self._source.tensor(name)
        self._done += values.nbytes
        return values


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
    for engine in ("llm", "vision") if work.model.vision else ("llm",):
        start, stage, total = time.perf_counter(), f"writing {engine}", _bytes_of(work, engine)
        graph = _write_whole(work, engine, ReadingSource(work.source, stage, total, tell))
        tell(stage, total, total)
        figures: dict[str, Any] = {
            "weights_bytes": graph.weights.packed_int4 + graph.weights.floats,
            "packed_int4_bytes": graph.weights.packed_int4,
            "scratch_bytes": None,
            "seconds": round(time.perf_counter() - start, 2),
            "peak_bytes": None,
            "stages": [],
        }
        made[engine] = (StageSpec(graph.path.name, graph.inputs, graph.outputs),), figures
    return made


def _write_whole(work: Work, engine: str, source: WeightSource) -> GraphFile:
    if engine == "llm":
        path = work.directory / LLM_GRAPH
        text, limits = work.model.text, work.limits
        return text_graph(work.lowering, source, text, limits, work.policy, path)
    assert work.model.vision is not None
    path = work.directory / VISION_GRAPH
    return vision_graph(work.lowering, source, work.model.vision, path)


def _bytes_of(work: Work, engine: str) -> int:
    """What ReadingSource counts up to."""
    total = 0
    for name in work.source.names():
        if name.startswith("visual.") == (engine == "vision") and name != EMBEDDING:
            total += 4 * math.prod(work.source.shape(name))
    if engine == "llm" and work.model.text.tie_word_embeddings:
        total += 4 * math.prod(work.source.shape(EMBEDDING))
    return total


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

        reports = _compile_chain(work, engine, stages, tell)
        made[engine] = (
            tuple(_spec(work, engine, p) for p in stages),
            _figures(reports, packed_int4_bytes(work.model, work.policy) if engine == "llm" else 0),
        )
    for stages in planned.values():
        for p in stages:  # only now: until all are done they are what a later run goes on from
            report_file(p.stage.engine).unlink()
    return made


def _compile_chain(
    work: Work, engine: str, stages: Sequence[PlannedStage], tell: Tell
) -> Sequence[StageReport]:
    assert work.target.compiler is not None
    ends = list(itertools.accumulate(p.plan.bytes for p in stages))

    def progress(p: StageProgress) -> None:
        done = p.number - (p.state == "started")
        tell(f"compiling {engine}", ends[done - 1] if done else 0, ends[-1])

    return compile_stages([p.stage for p in stages], work.target.compiler, progress)


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
