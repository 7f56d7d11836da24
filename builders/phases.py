"""Writes the graphs of a bundle and, where the target has a compiler, compiles them.

Knows what each phase is made of and the figures it leaves behind; no weights, no operators.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from builders.blocks import Lowering, WeightPolicy
from builders.decoder import EMBEDDING, GraphFile, TextPart, text_border, text_graph
from builders.engine import (
    Compiler,
    compile_stages,
    stage_progress,
)
from builders.lowering import host_memory
from builders.planner import kept_16bit, packed_int4_bytes
from builders.qwen_tower import VisionPart, vision_border, vision_graph
from builders.report import figures
from builders.stages import PlannedStage, StageSource, text_stages, vision_stages
from builders.targets import Target
from builders.weights import WeightSource
from edgevlm.bundle import LLM_GRAPH, VISION_GRAPH, Pending, PendingStage, StageSpec
from edgevlm.config import Limits, ModelConfig
from edgevlm.preprocess import max_patches
from edgevlm.vlm import peak_rss_bytes

# Below this some kernels could not be chosen at all, and the fastest hardly ever.
MIN_WORKSPACE = 64 << 20
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
    workspace: int = 0  # bytes of scratch that a layer may have where it is compiled on a board


@dataclass(frozen=True)
class Built:
    """The stages of each phase, and figures for the report by engine ("llm", "vision").

    `compiler` None: nothing was compiled. `pending`: what is still to be.
    """

    phases: dict[str, tuple[StageSpec, ...]]
    engines: dict[str, dict[str, Any]]
    kept_16bit: list[dict[str, str]]
    compiler: Compiler | None = None
    pending: Pending | None = None


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

    def rows(self, name: str, begin: int, end: int) -> NDArray[np.float32]:
        """As `tensor`."""
        self._tell(self._stage, min(self._done, self._total), self._total)
        values = self._source.rows(name, begin, end)
        self._done += values.nbytes
        return values


def build_phases(work: Work, tell: Tell) -> Built:
    """Write, and compile if need be and it can be done here, the language model and the tower."""
    compiler, pending = compiler_of(work), None
    if compiler is None:
        made = _write(work, tell)
    elif work.target.here:
        made = _compile(work, compiler, tell)
    else:
        made, pending = _prepare(work, compiler, tell)
    phases: dict[str, tuple[StageSpec, ...]] = {}
    for engine, (stages, _) in made.items():
        for phase in ("prefill", "decode") if engine == "llm" else ("vision",):
            phases[phase] = stages
    return Built(
        phases=phases,
        engines={engine: figures for engine, (_, figures) in made.items()},
        kept_16bit=kept_16bit(work.model, work.policy),
        compiler=None if pending else compiler,
        pending=pending,
    )


def compiler_of(work: Work) -> Compiler | None:
    """The target's compiler; a board's layers get no more scratch than the plan has."""
    compiler = work.target.compiler
    if compiler is None or compiler.name != "tensorrt":
        return compiler
    return replace(compiler, workspace=max(work.workspace, MIN_WORKSPACE))


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
            "scratch_bytes": _planned_scratch(work, engine),
            "seconds": round(time.perf_counter() - start, 2),
            "peak_bytes": peak_rss_bytes(),  # of the builder: nothing is compiled
            "stages": [],
        }
        made[engine] = (StageSpec(graph.path.name, graph.inputs, graph.outputs),), figures
    return made


def _planned_scratch(work: Work, engine: str) -> int:
    """What the executor's arena has for this graph; ONNX Runtime reports nothing itself."""
    processor = work.model.image_processor
    patches = max_patches(processor) if processor else 0
    return host_memory.scratch_bytes(_part(engine), work.model, work.limits, patches)


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


def _planned(work: Work) -> dict[str, tuple[PlannedStage, ...]]:
    of = StageSource(
        work.source,
        work.model,
        work.limits,
        work.policy,
        work.lowering,
        work.identity,
        work.target.stage_limit,
    )
    planned = {"llm": text_stages(of, work.directory), "vision": vision_stages(of, work.directory)}
    return {engine: stages for engine, stages in planned.items() if stages}


def _compile(work: Work, compiler: Compiler, tell: Tell) -> Made:
    """Each stage is written, compiled in a child process, and its graph removed."""
    planned, made = _planned(work), {}
    for engine, stages in planned.items():
        ends = list(itertools.accumulate(p.plan.bytes for p in stages))
        progress = stage_progress(f"compiling {engine}", ends, tell)
        reports = compile_stages([p.stage for p in stages], compiler, progress)
        packed = packed_int4_bytes(work.model, work.policy) if engine == "llm" else 0
        made[engine] = (tuple(_spec(work, engine, p) for p in stages), figures(reports, packed))
    return made


def _prepare(work: Work, compiler: Compiler, tell: Tell) -> tuple[Made, Pending]:
    """Each stage is written, for `edgevlm compile` on the board."""
    made: Made = {}
    pending: list[PendingStage] = []
    for engine, stages in _planned(work).items():
        start, total, done = time.perf_counter(), sum(p.plan.bytes for p in stages), 0
        for p in stages:
            tell(f"writing {engine}", done, total)
            assert p.stage.write is not None
            p.stage.write()
            done += p.plan.bytes
            dims = {profile.name: dict(profile.dims) for profile in p.stage.profiles}
            names = (p.stage.onnx.name, p.stage.engine.name)
            pending.append(PendingStage(_part(engine), *names, p.plan.bytes, dims))
        tell(f"writing {engine}", total, total)
        report: dict[str, Any] = {
            "weights_bytes": total,
            "packed_int4_bytes": packed_int4_bytes(work.model, work.policy)
            if engine == "llm"
            else 0,
            "scratch_bytes": None,
            "seconds": round(time.perf_counter() - start, 2),
            "peak_bytes": None,
            "stages": [],
        }
        made[engine] = (tuple(_spec(work, engine, p) for p in stages), report)
    facts = (compiler.name, compiler.compute_capability, compiler.workspace)
    return made, Pending(*facts, tuple(pending))


def _part(engine: str) -> Literal["llm", "vision"]:
    return "llm" if engine == "llm" else "vision"


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
