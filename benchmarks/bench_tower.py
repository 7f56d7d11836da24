"""Times Qwen2-VL-2B's tower at its published size on the host, beside transformers.

    python benchmarks/bench_tower.py WORK [--size 640x480]... [--peer] [--threads 2]

Each run is a process of its own; --peer needs torch and transformers (fp32, sdpa). WORK takes
2.7 GB. One JSON line a run: seconds of the run, peak RSS above what was resident before it.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SIZES = ["640x480"]


def resident() -> int:
    """Bytes resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The most that was."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(who: str, grid: tuple[int, int, int], seconds: float, before: int) -> None:
    """One JSON line."""
    patches = grid[0] * grid[1] * grid[2]
    above = peak() - before
    figures = {"who": who, "patches": patches, "seconds": round(seconds, 2)}
    print(json.dumps(figures | {"peak_above_weights_bytes": above}), flush=True)


def ours(work: Path, grid: tuple[int, int, int], threads: int) -> None:
    """The graph that a bundle would hold, in the arena that its plan would give it."""
    import onnxruntime as ort

    from builders.lowering import host_memory
    from builders.lowering.host import HostLowering
    from builders.presets import find_model
    from builders.qwen_tower import vision_graph
    from builders.weights import RandomWeights
    from edgevlm.config import Limits
    from edgevlm.executors import host
    from edgevlm.positions import vision_rope

    model = find_model("qwen2-vl-2b").config
    assert model.vision is not None
    path = work / "vision.onnx"
    if not path.exists():
        vision_graph(HostLowering(), RandomWeights(model), model.vision, path)
    patches = grid[0] * grid[1] * grid[2]
    planned, _ = host_memory.activation_bytes(model, Limits(256, 16, 1, 1, 1), patches)
    options = host._session_options(threads)
    sessions, plugs = host._load({"vision.onnx": path}, options, planned)
    session = sessions["vision.onnx"]
    cos, sin = vision_rope(grid, model.vision)
    pixels = np.random.default_rng(0).standard_normal((patches, model.vision.patch_dim))
    inputs = {"pixel_values": pixels.astype(np.float32), "vision_cos": cos, "vision_sin": sin}
    before, start = resident(), time.perf_counter()
    session.run(["image_features"], inputs, ort.RunOptions())
    report("ours", grid, time.perf_counter() - start, before)
    print(json.dumps({"planned_activations_bytes": planned, "plugs": len(plugs)}), flush=True)


def peer(grid: tuple[int, int, int], threads: int) -> None:
    """transformers' tower, fp32, sdpa."""
    import torch
    from transformers.models.qwen2_vl import modeling_qwen2_vl as m
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

    torch.set_num_threads(threads)
    config = Qwen2VLVisionConfig(hidden_size=1536)
    config._attn_implementation = "sdpa"
    tower = m.Qwen2VisionTransformerPretrainedModel(config).eval()
    patches = grid[0] * grid[1] * grid[2]
    pixels = torch.randn(patches, 1176)
    before, start = resident(), time.perf_counter()
    with torch.inference_mode():
        tower(pixels, grid_thw=torch.tensor([grid]))
    report("transformers", grid, time.perf_counter() - start, before)


def main() -> None:
    """Run the children in turn."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--size", action="append", metavar="WxH")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", choices=("ours", "peer"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for size in args.size or SIZES:
        width, height = (round(int(side) / 28) * 2 for side in size.split("x"))
        grid = (1, height, width)
        if args.child:
            ours(args.work, grid, args.threads) if args.child == "ours" else peer(
                grid, args.threads
            )
            continue
        for child in ("ours", "peer") if args.peer else ("ours",):
            command = [sys.executable, __file__, str(args.work), "--size", size, "--child", child]
            subprocess.run([*command, "--threads", str(args.threads)], check=True)


if __name__ == "__main__":
    main()
