"""Bundles for the scripted TensorRT: a tiny model's graphs in one of the two lowerings, in stages.

Everything but graphs and plan is the host bundle's of the same checkpoint.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from builders.blocks import Lowering, WeightPolicy
from builders.checkpoint import Checkpoint
from builders.decoder import GraphFile, TextPart, text_graph
from builders.lowering.classic import ClassicLowering
from builders.lowering.native import NativeLowering
from builders.planner import tower_windows
from builders.qwen_tower import VisionPart, vision_graph
from builders.tensors import cache_shapes, io_shapes, new_cache_shapes
from edgevlm.bundle import MANIFEST, Bundle, StageSpec, record
from edgevlm.config import Limits, ModelConfig
from edgevlm.memory_plan import DType, MemoryPlan, Pool, place, placed_bytes
from edgevlm.preprocess import max_patches
from edgevlm.runner import ModelRunner
from tests.scripted_tensorrt import Scripted, write_engine
from tests.tiny_models import Tiny, TinyModels, make_prompt, prefill, running

LOWERINGS: dict[str, type[Lowering]] = {"native": NativeLowering, "classic": ClassicLowering}
VLM, TEXT = "qwen2_5_vl-tied", "llama"
NEW, OLD = "10.16.2.10", "10.3.0.30"
VERSIONS = {"native": NEW, "classic": OLD}
SMALL = Limits(64, 8, 1)
SCRATCH = 4096
STAGING = 128 << 10
EXPECTED: dict[tuple[Any, ...], list["Answer"]] = {}
Answer = tuple[list[int], NDArray[np.float32]]  # greedy tokens, and the logits they came from
Install = Callable[..., Scripted]  # (version, name of the module)


def scripted_bundle(
    tiny: Tiny,
    directory: Path,
    lowering: str = "native",
    dtype: DType = "float32",
    limits: Limits | None = None,
    stages: int = 2,
) -> Bundle:
    """Write a bundle whose engines the scripted TensorRT runs."""
    manifest = tiny.bundle.manifest
    limits = limits or manifest.limits
    shutil.copytree(tiny.bundle.path, directory, ignore=shutil.ignore_patterns("*.onnx*", MANIFEST))
    spelled = LOWERINGS[lowering](dtype=dtype)
    source = Checkpoint(tiny.checkpoint)
    text = _text_stages(spelled, source, manifest.model, limits, directory, stages)
    phases = {"prefill": text, "decode": text}
    if manifest.model.vision is not None:
        phases["vision"] = _vision_stages(spelled, source, manifest.model, directory, stages)
    plan = _plan(manifest.model, limits, dtype, phases, lowering == "classic")
    files = {p.name: record(p) for p in directory.iterdir()}
    made = replace(
        manifest,
        executor="tensorrt",
        target="scripted",
        lowering=lowering,
        phases=phases,
        plan=plan,
        files=files,
    )
    return Bundle(directory, made)


def _cuts(count: int, stages: int) -> list[tuple[int, int]]:
    edges = [count * i // stages for i in range(stages + 1)]
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False) if a < b]


def _text_stages(
    lowering: Lowering, source: Any, model: ModelConfig, limits: Limits, out: Path, stages: int
) -> tuple[StageSpec, ...]:
    profiles = [
        {"batch_size": (1, 1), "sequence_length": (1, limits.max_prefill_chunk)},
        {"batch_size": (1, limits.slots), "sequence_length": (1, 1)},
    ]
    layers = model.text.num_hidden_layers
    policy = WeightPolicy("fp32" if lowering.dtype == "float32" else "fp16", 32)
    made = []
    for i, (first, end) in enumerate(_cuts(layers, stages)):
        path = out / f"llm.{i}.onnx"
        part = TextPart(first, end, end == layers)
        file = text_graph(lowering, source, model.text, limits, policy, path, part)
        made.append(_stage(file, profiles))
    return tuple(made)


def _vision_stages(
    lowering: Lowering, source: Any, model: ModelConfig, out: Path, stages: int
) -> tuple[StageSpec, ...]:
    assert model.vision is not None and model.image_processor is not None
    patches = max_patches(model.image_processor)
    profile = {"num_patches": (4, patches), "num_windows": (1, max(1, tower_windows(model)))}
    made = []
    for i, (first, end) in enumerate(_cuts(model.vision.depth, stages)):
        path = out / f"vision.{i}.onnx"
        file = vision_graph(lowering, source, model.vision, path, VisionPart(first, end))
        made.append(_stage(file, [profile]))
    return tuple(made)


def _stage(file: GraphFile, profiles: list[dict[str, tuple[int, int]]]) -> StageSpec:
    engine = file.path.with_suffix(".engine")
    write_engine(file.path, engine, profiles, SCRATCH)
    for path in file.path.parent.glob(f"{file.path.name}*"):
        path.unlink()
    return StageSpec(engine.name, file.inputs, file.outputs)


def _plan(
    model: ModelConfig,
    limits: Limits,
    dtype: DType,
    phases: dict[str, tuple[StageSpec, ...]],
    classic: bool,
) -> MemoryPlan:
    cache = place("kv_cache", cache_shapes(model.text, limits, dtype))
    shapes = io_shapes(model, limits, dtype, tower_windows(model))
    tokens = max(limits.max_prefill_chunk, limits.slots)
    rows = {"hidden_states": (tokens, model.text.hidden_size)}
    if model.vision is not None and model.image_processor is not None:
        rows["vision_states"] = (max_patches(model.image_processor), model.vision.hidden_size)
    known = {name for name, _, _ in shapes}
    for stage in (stage for stages in phases.values() for stage in stages):
        for spec in stage.outputs:
            kind = spec.name.partition(".")[0]
            if kind in rows and spec.name not in known:
                known.add(spec.name)
                shapes.append((spec.name, dtype, rows[kind]))
    if classic:
        shapes += new_cache_shapes(model.text, limits, dtype)
    io = place("io", shapes)
    pools = (
        Pool("weights.llm", 1 << 20, ""),
        *([Pool("weights.vision", 1 << 19, "")] if model.vision else []),
        Pool("kv_cache", placed_bytes(cache), ""),
        Pool("io", placed_bytes(io), ""),
        Pool("activations", SCRATCH, ""),
        Pool("staging", STAGING, ""),
    )
    return MemoryPlan(limits, pools, (*cache, *io))


class Bundles:
    """Makes each scripted bundle once."""

    def __init__(self, tiny: TinyModels, directory: Path) -> None:
        self.tiny, self.directory = tiny, directory
        self._made: dict[tuple[Any, ...], Bundle] = {}

    def get(self, name: str, lowering: str = "native", dtype: Any = "float32", **kw: Any) -> Bundle:
        key = (name, lowering, dtype, *kw.items())
        if key not in self._made:
            out = self.directory / str(len(self._made))
            self._made[key] = scripted_bundle(self.tiny.get(name), out, lowering, dtype, **kw)
        return self._made[key]


def answer(
    runner: ModelRunner, tiny: Tiny, pictures: list[Image.Image], slot: int = 0, tokens: int = 4
) -> Answer:
    """Four greedy tokens after a question."""
    logits = [prefill(runner, slot, make_prompt(tiny, "What is it?", pictures), pictures)]
    found = []
    for _ in range(tokens):
        found.append(int(logits[-1].argmax()))
        step = [(runner.slots[slot], found[-1])]
        logits.append(runner.decode(step)[slot].copy())
    return found, np.array(logits)


def expected(tiny: Tiny, *questions: list[Image.Image]) -> list[Answer]:
    """The host executor's answers, each computed once."""
    key = (tiny.bundle.path, *(p.tobytes() for pictures in questions for p in pictures))
    if key not in EXPECTED:
        with running(tiny) as runner:
            EXPECTED[key] = [answer(runner, tiny, pictures) for pictures in questions]
    return EXPECTED[key]


def changed(bundle: Bundle, **changes: Any) -> Bundle:
    return replace(bundle, manifest=replace(bundle.manifest, **changes))


def with_pool(bundle: Bundle, name: Any, nbytes: int) -> Bundle:
    plan = bundle.manifest.plan
    pools = tuple(Pool(name, nbytes, "") if p.name == name else p for p in plan.pools)
    return changed(bundle, plan=replace(plan, pools=pools))
