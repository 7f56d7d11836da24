"""The process that holds the compiler: one stage in, one engine file out. Run by engine.py.

It reads a job (JSON) on stdin and answers with one JSON document on stdout. The vendor library is
imported here and nowhere else among the builders; all its memory goes back when this exits.
"""

import contextlib
import ctypes
import importlib
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
ACTIVATION_LINE = re.compile(r"Total Activation Memory: (\d+) bytes")
WEIGHTS_LINE = re.compile(r"Total Weights Memory: (\d+) bytes")
PR_SET_PDEATHSIG = 1
MOST_LIKELY_VICTIM = "1000"  # of the kernel, when memory runs out


class Refused(Exception):
    """The compiler said no; the text is its own words."""


def die_with_parent(parent: int) -> None:
    """A killed build must not leave a compiler behind that holds gigabytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def die_first() -> None:
    """Where memory runs out the compiler has to go, not the board's other programs."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(MOST_LIKELY_VICTIM, encoding="ascii")


def peak_bytes() -> int:
    """Most memory that this process held; ru_maxrss would inherit the parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found.group(1)) * 1024 if found else 0


class Log:
    """What the builder said: errors to repeat, and the figures that only its log has."""

    def __init__(self, trt: Any) -> None:
        self.errors: list[str] = []
        self.activation: list[int] = []  # one a profile, in their order
        self.weights: list[int] = []
        keep = self._keep

        class Sink(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                keep(severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR), message)

        self.sink = Sink()

    def _keep(self, error: bool, message: str) -> None:
        if error:
            self.errors.append(message.strip())
            print(message, file=sys.stderr)
        elif found := ACTIVATION_LINE.search(message):
            self.activation.append(int(found.group(1)))
        elif found := WEIGHTS_LINE.search(message):
            self.weights.append(int(found.group(1)))


def network_from_onnx(trt: Any, builder: Any, log: Log, onnx: str) -> tuple[Any, Any]:
    """Parse the graph, strongly typed. The parser must outlive the network."""
    flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flag)
    parser = trt.OnnxParser(network, log.sink)
    if not parser.parse_from_file(onnx):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        words = [f"{e.desc()} (node {e.node_name()} [{e.node_operator()}])" for e in errors]
        raise Refused("; ".join(words) or "the ONNX parser refused the graph")
    return network, parser


def shape_ranges(tensor: Any, profile: dict[str, Any]) -> list[list[int]]:
    """[min, opt, max] of an input's shape, its dims looked up by name."""
    shapes: list[list[int]] = [[], [], []]
    for axis, size in enumerate(tensor.shape):
        name = tensor.get_dimension_name(axis)
        if size < 0 and name not in profile["dims"]:
            raise Refused(
                f"input {tensor.name} has the dimension {name!r}, for which profile "
                f"{profile['name']} gives no range (it has {', '.join(profile['dims']) or 'none'})"
            )
        limits = (size, size, size) if size >= 0 else profile["dims"][name]
        for shape, limit in zip(shapes, limits, strict=True):
            shape.append(limit)
    return shapes


def builder_config(trt: Any, builder: Any, network: Any, job: dict[str, Any]) -> Any:
    """Profiles in the job's order, compiled for the job's GPU."""
    config = builder.create_builder_config()
    if job["compute_capability"]:
        config.num_compute_capabilities = 1
        capability = getattr(trt.ComputeCapability, job["compute_capability"])
        config.set_compute_capability(capability, 0)
    if job["compiler"] == "tensorrt":
        use_board_settings(trt, config, job)
    for wanted in job["profiles"]:
        profile = builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            profile.set_shape(tensor.name, *shape_ranges(tensor, wanted))
        if config.add_optimization_profile(profile) < 0:
            raise Refused(f"profile {wanted['name']} does not fit the graph's inputs")
    return config


def use_board_settings(trt: Any, config: Any, job: dict[str, Any]) -> None:
    """A bounded workspace, no streams of its own, and timings that earlier stages left."""
    if job["workspace"]:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job["workspace"])
    config.max_aux_streams = 0  # each would have scratch memory of its own
    cache = Path(job["timing_cache"])
    known = cache.read_bytes() if cache.is_file() else b""
    # One from another TensorRT or GPU is refused, and an empty one put in its place.
    if not config.set_timing_cache(config.create_timing_cache(known), False):
        config.set_timing_cache(config.create_timing_cache(b""), False)


def keep_timings(config: Any, cache: Path) -> None:
    """Write what was timed beside the engines, whole or not at all."""
    timed = config.get_timing_cache()
    if timed is not None:
        part = cache.with_name(cache.name + ".part")
        part.write_bytes(memoryview(timed.serialize()))
        os.replace(part, cache)


def build(trt: Any, builder: Any, network: Any, config: Any, path: Path) -> int:
    """Compile into the file and make it durable; where there is a writer, never whole in memory."""
    with path.open("wb") as file:
        if not hasattr(trt, "IStreamWriter"):  # before 10.13
            plan = builder.build_serialized_network(network, config)
            if plan is None:
                raise Refused("the compiler gave no engine")
            file.write(memoryview(plan))
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

        class Writer(trt.IStreamWriter):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.IStreamWriter.__init__(self)

            def write(self, data: Any) -> int:
                return file.write(data)

        if not builder.build_serialized_network_to_stream(network, config, Writer()):
            raise Refused("the compiler gave no engine")
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def layer_counts(network: Any) -> dict[str, int]:
    """Layers of the parsed network by type; an attention is counted once."""
    types = (str(network.get_layer(i).type) for i in range(network.num_layers))
    counts = Counter(t.rsplit(".", 1)[-1] for t in types)
    counts["ATTENTION"] = counts.pop("ATTENTION_INPUT", 0)
    counts.pop("ATTENTION_OUTPUT", None)
    return {name: counts[name] for name in sorted(counts) if counts[name]}


def read_figures(trt: Any, log: Log, job: dict[str, Any]) -> None:
    """Scratch by profile from the engine itself: not every TensorRT's log has one line for each."""
    engine = trt.Runtime(log.sink).deserialize_cuda_engine(Path(job["out"]).read_bytes())
    if engine is None:
        raise Refused("; ".join([*log.errors[-3:], "its own engine cannot be read back"]))
    of_profile = engine.get_device_memory_size_for_profile_v2
    log.activation[:] = [int(of_profile(i)) for i in range(len(job["profiles"]))]
    if not log.weights:
        log.weights.append(Path(job["out"]).stat().st_size)


def compile_job(job: dict[str, Any]) -> dict[str, Any]:
    """The whole work. Raises Refused with the compiler's words."""
    start = time.monotonic()
    try:
        trt = importlib.import_module(MODULES[job["compiler"]])
    except ImportError as error:
        raise Refused(f"{job['compiler']} is not installed here ({error})") from None
    log = Log(trt)
    builder = trt.Builder(log.sink)
    network, parser = network_from_onnx(trt, builder, log, job["onnx"])
    layers = layer_counts(network)
    config = builder_config(trt, builder, network, job)
    log.errors.clear()
    try:
        plan_bytes = build(trt, builder, network, config, Path(job["out"]))
    except Refused as error:
        raise Refused("; ".join([*log.errors[-3:], str(error)])) from None
    if job["compiler"] == "tensorrt":
        keep_timings(config, Path(job["timing_cache"]))
    del config, network, parser, builder
    if job["compiler"] == "tensorrt":
        read_figures(trt, log, job)
    if len(log.activation) != len(job["profiles"]) or not log.weights:
        raise Refused("its log does not state the weights and the scratch of each profile")
    names = [profile["name"] for profile in job["profiles"]]
    return {
        "compiler": f"{job['compiler']} {trt.__version__}",
        "weights_bytes": log.weights[-1],
        "plan_bytes": plan_bytes,
        "scratch_bytes": dict(zip(names, log.activation, strict=True)),
        "layers": layers,
        "seconds": round(time.monotonic() - start, 2),
        "peak_bytes": peak_bytes(),
    }


def main() -> int:
    """Entry of the child process."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the vendor library prints must not mix with the answer
    job = json.loads(sys.stdin.buffer.readline())
    die_with_parent(job["parent"])
    die_first()
    try:
        result = compile_job(job)
    except (Refused, OSError) as error:
        result = {"error": " ".join(str(error).split())}
    with answer:
        json.dump(result, answer)
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
