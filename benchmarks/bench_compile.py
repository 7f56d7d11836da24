"""Compiles published sizes for SM86 with tensorrt-rtx, in stages, and prints what that took.

    python benchmarks/bench_compile.py WORK [--checkpoint DIR] [--stage-bytes N] [--only NAME]

(a) --checkpoint: a real model, e.g. Qwen2.5-0.5B-Instruct; (b) Qwen2-VL-7B, language model and
tower, at its published size with random weights. Graphs are written stage by stage and removed
again, so WORK needs about 2 GB more than the engines. Exit code 1: a bound was missed.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from builders.blocks import WeightPolicy
from builders.checkpoint import Checkpoint
from builders.engine import STAGE_BYTES, StageProgress, StageReport, compile_stages
from builders.stages import PlannedStage, StageSource, text_stages, vision_stages
from builders.targets import find_target, lowering_for
from builders.weights import RandomWeights
from edgevlm.config import (
    GenerationDefaults,
    ImageProcessorConfig,
    Limits,
    ModelConfig,
    RopeConfig,
    TextConfig,
    VisionConfig,
)

PEAK_LIMIT = 5_000_000_000  # bytes resident in the compiler of any stage
RATIO_LIMIT = 1.02  # weights that the compiler reports / packed bytes
TARGET = find_target("rtx-sm86")

QWEN2_VL_7B = ModelConfig(
    "qwen2_vl",
    TextConfig(
        model_type="qwen2_vl",
        vocab_size=152064,
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=18944,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6, "mrope", (16, 24, 24)),
        tie_word_embeddings=False,
        attention_bias=True,
        max_position_embeddings=32768,
    ),
    GenerationDefaults((151645,)),
    VisionConfig(
        model_type="qwen2_vl",
        depth=32,
        hidden_size=1280,
        num_heads=16,
        intermediate_size=5120,
        out_hidden_size=3584,
        hidden_act="quick_gelu",
        in_channels=3,
        patch_size=14,
        temporal_patch_size=2,
        spatial_merge_size=2,
    ),
    # 1,024 image tokens are 4,096 patches
    ImageProcessorConfig("smart_resize", 14, 2, 2, 3136, 1024 * 28 * 28, (0.5,) * 3, (0.5,) * 3),
)


def note(event: StageProgress) -> None:
    """Progress on stderr, where a person looks."""
    figures = f"{event.bytes / 1e6:.0f} MB, {event.seconds:.0f} s" if event.bytes else ""
    text = f"{event.number}/{event.count} {event.name} {event.state} {figures}"
    print(text, file=sys.stderr, flush=True)


def stage_figures(planned: PlannedStage, report: StageReport) -> dict[str, Any]:
    """One stage as JSON."""
    plan = planned.plan
    return {
        "name": report.name,
        "layers": [plan.first_layer, plan.end_layer],
        "head": plan.head,
        "weights_bytes": report.weights_bytes,
        "packed_bytes": plan.bytes,
        "scratch_bytes": report.scratch_bytes,
        "plan_bytes": report.plan_bytes,
        "seconds": report.seconds,
        "peak_bytes": report.peak_bytes,
        "kv_cache_updates": report.layers.get("KV_CACHE_UPDATE", 0),
    }


def compile_model(
    name: str, stages: tuple[PlannedStage, ...], wanted: str | None
) -> dict[str, Any]:
    """Compile one chain; sums and maxima over its stages."""
    if not stages or wanted not in (None, name):
        return {}
    assert TARGET.compiler is not None
    start = time.monotonic()
    reports = compile_stages([planned.stage for planned in stages], TARGET.compiler, note)
    rows = [stage_figures(p, r) for p, r in zip(stages, reports, strict=True)]
    phases = sorted({phase for row in rows for phase in row["scratch_bytes"]})
    return {
        name: {
            "weights_bytes": sum(row["weights_bytes"] for row in rows),
            "packed_bytes": sum(row["packed_bytes"] for row in rows),
            "ratio": sum(r["weights_bytes"] for r in rows) / sum(r["packed_bytes"] for r in rows),
            "scratch_bytes": {
                p: max(row["scratch_bytes"].get(p, 0) for row in rows) for p in phases
            },
            "plan_bytes": sum(row["plan_bytes"] for row in rows),
            "compile_seconds": round(sum(row["seconds"] for row in rows), 1),
            "wall_seconds": round(time.monotonic() - start, 1),
            "peak_bytes": max(row["peak_bytes"] for row in rows),
            "compiler": reports[0].compiler,
            "stages": rows,
        }
    }


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--stage-bytes", type=int, default=STAGE_BYTES)
    parser.add_argument("--only", help="one of checkpoint, qwen2-vl-7b.llm, qwen2-vl-7b.vision")
    args = parser.parse_args()
    lowering = lowering_for(TARGET)
    policy = WeightPolicy("int4", 128)
    figures: dict[str, Any] = {"load_at_start": os.getloadavg()}
    if args.checkpoint:
        source = Checkpoint(args.checkpoint)
        limits = Limits(1024, 256, 1)
        whole = StageSource(
            source, source.config, limits, policy, lowering, str(args.checkpoint.resolve())
        )
        stages = text_stages(whole, args.work / "checkpoint")
        figures |= compile_model("checkpoint", stages, args.only)
    limits = Limits(4096, 512, 1, 1, 1024 * 28 * 28)
    random = RandomWeights(QWEN2_VL_7B)
    of = StageSource(random, QWEN2_VL_7B, limits, policy, lowering, "random 0", args.stage_bytes)
    work = args.work / "qwen2-vl-7b"
    figures |= compile_model("qwen2-vl-7b.vision", vision_stages(of, work), args.only)
    figures |= compile_model("qwen2-vl-7b.llm", text_stages(of, work), args.only)
    figures["load_at_end"] = os.getloadavg()
    missed = [
        f"{name}: {figure} is {value[figure]:.4g}, the bound is {bound:.4g}"
        for name, value in figures.items()
        if isinstance(value, dict)
        for figure, bound in (("peak_bytes", PEAK_LIMIT), ("ratio", RATIO_LIMIT))
        if value[figure] > bound
    ]
    print(json.dumps(figures | {"missed": missed}, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
