"""A model as a chain of stages for the compiler: which layers each holds, and how it is written.

It decides; builders/decoder.py and builders/qwen_tower.py write, builders/engine.py compiles.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from builders.blocks import Lowering, WeightPolicy
from builders.decoder import TextPart, text_graph
from builders.engine import (
    Profile,
    Stage,
    StagePlan,
    decode_profile,
    prefill_profile,
    vision_profile,
)
from builders.planner import text_stage_plans, tower_windows, vision_stage_plans
from builders.qwen_tower import VisionPart, has_windows, vision_graph
from builders.room import STAGE_BYTES
from builders.weights import WeightSource
from edgevlm.bundle import LLM_GRAPH, VISION_GRAPH
from edgevlm.config import Limits, ModelConfig, to_dict
from edgevlm.preprocess import max_patches


@dataclass(frozen=True)
class PlannedStage:
    """A stage and what its weights must take: INT4 packed, the rest in the graph's dtype."""

    stage: Stage
    plan: StagePlan


@dataclass(frozen=True)
class StageSource:
    """What all the stages of one model are made from. `identity` names the weights' values."""

    source: WeightSource
    model: ModelConfig
    limits: Limits
    policy: WeightPolicy
    lowering: Lowering
    identity: str
    limit: int = STAGE_BYTES


def text_stages(of: StageSource, directory: Path) -> tuple[PlannedStage, ...]:
    """The language model: whole layers, the head where it fits or alone. Raises BuildError."""
    profiles = (prefill_profile(of.limits.max_prefill_chunk), decode_profile(of.limits.slots))
    plans = text_stage_plans(of.model, of.policy, of.limit)
    planned = []
    for i, plan in enumerate(plans):
        onnx = directory / stage_file(LLM_GRAPH, i, len(plans))
        write = partial(
            text_graph,
            of.lowering,
            of.source,
            of.model.text,
            of.limits,
            of.policy,
            onnx,
            TextPart(plan.first_layer, plan.end_layer, plan.head),
        )
        planned.append(_planned(of, plan, onnx, profiles, write))
    return tuple(planned)


def vision_stages(of: StageSource, directory: Path) -> tuple[PlannedStage, ...]:
    """The tower: whole blocks; patch embedding and merger go with the first and the last."""
    vision, processor = of.model.vision, of.model.image_processor
    if vision is None or processor is None:
        return ()
    patches, merge = max_patches(processor), vision.spatial_merge_size**2
    plans = vision_stage_plans(of.model, of.limit)
    planned = []
    for i, plan in enumerate(plans):
        onnx = directory / stage_file(VISION_GRAPH, i, len(plans))
        part = VisionPart(plan.first_layer, plan.end_layer)
        windows = tower_windows(of.model) if has_windows(vision, part) else 0
        write = partial(vision_graph, of.lowering, of.source, vision, onnx, part)
        profiles = (vision_profile(patches, windows, merge),)
        planned.append(_planned(of, plan, onnx, profiles, write))
    return tuple(planned)


def stage_file(name: str, number: int, count: int) -> str:
    """llm.onnx, or llm.0.onnx, llm.1.onnx, ... where there are several."""
    stem, _, suffix = name.partition(".")
    return name if count == 1 else f"{stem}.{number}.{suffix}"


def _planned(
    of: StageSource,
    plan: StagePlan,
    onnx: Path,
    profiles: tuple[Profile, ...],
    write: Callable[[], object],
) -> PlannedStage:
    engine = onnx.with_suffix(".engine")
    return PlannedStage(Stage(onnx.stem, onnx, engine, profiles, write, _key(of, plan)), plan)


def _key(of: StageSource, plan: StagePlan) -> str:
    facts = [
        of.identity,
        to_dict(of.model),
        to_dict(of.limits),
        to_dict(of.policy),
        [of.lowering.name, of.lowering.dtype],
        to_dict(plan),
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
