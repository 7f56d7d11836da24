"""Peak memory of a bundle in use against its plan: what the planner's constants are checked with.

  python benchmarks/bench_memory.py BUNDLE [BUNDLE ...]

Each bundle runs in a process of its own: imports, load, a text of one whole prefill chunk and,
where the model sees, the largest picture. Linux only: reads /proc/self/status. One JSON line each.
"""

import json
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20


def main(paths: list[str]) -> int:
    """One child for each bundle."""
    if paths[:1] == ["--child"]:
        measure(paths[1])
        return 0
    if not paths:
        sys.stderr.write((__doc__ or "") + "\n")
        return 2
    for path in paths:
        subprocess.run([sys.executable, __file__, "--child", path], check=True)
    return 0


def measure(path: str) -> None:
    """Print what was resident when, in MiB, beside the plan."""
    from PIL import Image

    import edgevlm.executors.host  # noqa: F401  counted among the imports
    from edgevlm import VLM, SamplingParams

    imports = resident("VmRSS")
    with VLM(path) as vlm:
        loaded = resident("VmHWM")
        manifest = vlm.bundle.manifest
        limits = manifest.limits
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        room = min(limits.max_prefill_chunk, limits.max_seq_len - 80)
        vlm.generate("the " * (room // 2), params=params)
        text = resident("VmHWM")
        side = int(limits.max_pixels**0.5) // 28 * 28
        if side and (side // 28) ** 2 < limits.max_seq_len - 80:
            vlm.generate("What?", images=[Image.new("RGB", (side, side))], params=params)
    peak, total = resident("VmHWM"), manifest.plan.total_bytes / MIB
    figures = {
        "bundle": Path(path).name,
        "imports": imports,
        "loaded": loaded,
        "text": text,
        "peak": peak,
        "planned": total,
        "peak_over_planned": peak / total,
        "beside_runtime": peak - imports,
        "pools": {p.name: p.bytes / MIB for p in manifest.plan.pools},
    }
    print(json.dumps(rounded(figures)), flush=True)


def resident(what: str) -> float:
    """A figure of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(what)


def rounded(value: object) -> object:
    """Floats with one digit (ratios, which are small, with three)."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, float):
        return round(value, 3 if value < 10 else 1)
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
