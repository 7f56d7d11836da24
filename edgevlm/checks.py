"""Start-up checks: whether this machine can run this bundle, before anything is loaded.

A failure names what was found, what is needed and what to do. Warnings are for the log.
"""

import logging
from collections.abc import Iterable
from typing import Literal

from edgevlm.boards import BAD_L4T, BAD_L4T_CHUNK, same_version, version_numbers
from edgevlm.bundle import (
    CHAT_TEMPLATE,
    EMBEDDING_TABLE,
    REFERENCE,
    TIMING_CACHE,
    TOKENIZER,
    BuiltOn,
    Manifest,
)
from edgevlm.device import Machine, read_machine, usable_bytes
from edgevlm.errors import BundleError, ExecutorError
from edgevlm.machine_checks import UPGRADE_L4T, memory_conditions
from edgevlm.machine_checks import Check as Check
from edgevlm.meminfo import headroom, mib

log = logging.getLogger(__name__)

NOT_WEIGHTS = (TOKENIZER, CHAT_TEMPLATE, EMBEDDING_TABLE, REFERENCE, TIMING_CACHE)
# The first TensorRT that compiles a lowering: native needs KVCacheUpdate and RotaryEmbedding.
FIRST_TENSORRT = {"native": (10, 15), "classic": (10, 3)}
# These say that the bundle is another machine's; all others that this machine lacks something.
MISMATCHES = frozenset(
    ("bundle engines", "bundle tensorrt", "bundle compute capability", "bundle l4t")
    + ("bundle lowering",)
)


def check_start(manifest: Manifest, machine: Machine | None = None) -> None:
    """Log the warnings. Raises BundleError, ExecutorError with the first failure."""
    checks = bundle_checks(manifest, read_machine() if machine is None else machine)
    for check in checks:
        if check.status == "warn":
            log.warning("%s", one_line(check))
    require(checks)


def require(checks: Iterable[Check]) -> None:
    """Raise the first failure: BundleError for another machine's bundle, else ExecutorError."""
    for check in checks:
        if check.status == "fail":
            kind = BundleError if check.name in MISMATCHES else ExecutorError
            raise kind(one_line(check))


def one_line(check: Check) -> str:
    """A finding as one sentence."""
    text = f"{check.name}: found {check.found}"
    if check.needed:
        text += f"; needed {check.needed}"
    return f"{text}; {check.remedy}" if check.remedy else text


def bundle_checks(manifest: Manifest, machine: Machine) -> list[Check]:
    """The bundle's demands against the machine, gravest first."""
    checks = [_executor(manifest, machine), _lowering(manifest, machine)]
    if manifest.pending is not None:
        checks.insert(0, _engines(manifest))
    elif manifest.executor != "host":
        checks += _built_on(manifest, machine)
    checks += [_plan(manifest, machine), _allocations(manifest, machine)]
    return [*checks, *memory_conditions(machine)]


def needed_bytes(manifest: Manifest) -> int:
    """What must be had at start: pools that the kernel cannot take back, and no mapped file.

    Weights count as the larger of plan and files, which differ where a compiler adds to them.
    """
    plan = manifest.plan
    weights = sum(pool.bytes for pool in plan.pools if pool.name.startswith("weights."))
    files = sum(r.bytes for name, r in manifest.files.items() if name not in NOT_WEIGHTS)
    return plan.total_bytes - weights + max(weights, files)


def largest_chunk(manifest: Manifest) -> tuple[int, str]:
    """(bytes, what for) of the largest piece of device memory that must be taken whole."""
    pieces = [(p.nbytes, f"the tensor {p.name}") for p in manifest.plan.placements]
    pieces += [(p.bytes, "scratch") for p in manifest.plan.pools if p.name == "activations"]
    for stages in manifest.phases.values():
        for stage in stages:
            if stage.file in manifest.files:
                pieces.append((manifest.files[stage.file].bytes, f"the engine {stage.file}"))
    return max(pieces, default=(0, "nothing"))


def _engines(manifest: Manifest) -> Check:
    assert manifest.pending is not None
    found = f"prepared for {manifest.target}, {len(manifest.pending.stages)} graphs not compiled"
    remedy = "run `edgevlm compile BUNDLE` on the board itself, which needs no checkpoint"
    return Check("bundle engines", "fail", found, "compiled engines", remedy)


def _executor(manifest: Manifest, machine: Machine) -> Check:
    libraries = machine.libraries
    tensorrt_rtx = {"TensorRT-RTX": libraries.tensorrt_rtx}
    cuda = {"libcuda.so.1": libraries.libcuda, "cuda-bindings": libraries.cuda_bindings}
    parts: dict[str, dict[str, str | None]] = {
        "host": {"onnxruntime": libraries.onnxruntime},
        "tensorrt": {**cuda, "TensorRT for this Python": libraries.tensorrt_python},
        "tensorrt-rtx": {**cuda, **tensorrt_rtx},
    }
    name, executor = "bundle executor", manifest.executor
    if executor not in parts:
        remedy = "build the checkpoint again with this edgevlm"
        return Check(name, "fail", repr(executor), f"one of {', '.join(parts)}", remedy)
    missing = [part for part, version in parts[executor].items() if version is None]
    needed = f"{', '.join(parts[executor])} for {executor}"
    if not missing:
        return Check(name, "ok", executor, needed)
    remedy = "pip install 'edgevlm[host]'"
    if executor != "host":
        remedy = "run it where there is an NVIDIA GPU, or build with --target host"
        if machine.gpu is not None:
            remedy = "`edgevlm doctor` says how to install what is missing"
    return Check(name, "fail", f"no {', no '.join(missing)}", needed, remedy)


def _lowering(manifest: Manifest, machine: Machine) -> Check:
    name, lowering = "bundle lowering", manifest.lowering
    on_host = manifest.executor == "host"
    if on_host != (lowering == "host"):
        needed = "host" if on_host else "native or classic"
        needed += f" for {manifest.executor}"
        return Check(name, "fail", lowering, needed, "build the checkpoint again")
    version = machine.libraries.tensorrt if manifest.executor == "tensorrt" else None
    first = FIRST_TENSORRT.get(lowering)
    if version is not None and first is not None and version_numbers(version) < first:
        remedy = "build with --lowering classic" if lowering == "native" else "flash JetPack 6.2.2"
        wanted = ".".join(map(str, first))
        return Check(
            name,
            "fail",
            f"{lowering}, and TensorRT {version} here",
            f"TensorRT {wanted} for {lowering}",
            remedy,
        )
    return Check(name, "ok", lowering)


def _built_on(manifest: Manifest, machine: Machine) -> list[Check]:
    """What the engines were compiled with against what would load them."""
    built = manifest.built_on
    if built is None:
        remedy = "where loading fails, run `edgevlm compile` on this machine"
        found = "no record of what the engines were compiled with"
        return [Check("bundle tensorrt", "warn", found, "the same TensorRT as here", remedy)]
    return [
        _tensorrt(manifest, built, machine),
        _same(
            "bundle compute capability",
            built.compute_capability,
            machine.compute_capability,
            "fail",
        ),
        _l4t(built, machine),
    ]


def _tensorrt(manifest: Manifest, built: BuiltOn, machine: Machine) -> Check:
    libraries = machine.libraries
    rtx = manifest.executor == "tensorrt-rtx"
    here = libraries.tensorrt_rtx if rtx else libraries.tensorrt
    return _same("bundle tensorrt", built.tensorrt, here, "fail")


def _l4t(built: BuiltOn, machine: Machine) -> Check:
    # Engines depend on TensorRT, which changes with the major release; the rest is a hint.
    there, here = built.l4t, machine.l4t
    grave: Literal["warn", "fail"] = "warn"
    if there and here and version_numbers(there)[:1] != version_numbers(here)[:1]:
        grave = "fail"
    return _same("bundle l4t", there, here, grave)


def _same(name: str, there: str | None, here: str | None, grave: Literal["warn", "fail"]) -> Check:
    if there is None or here is None:
        return Check(name, "ok", f"{here or 'unknown'} here, built for {there or 'unknown'}")
    if same_version(there, here):
        return Check(name, "ok", here, there)
    remedy = "run `edgevlm compile` on this machine, or copy a bundle built for it"
    return Check(name, grave, f"{here} on this machine", f"{there}, as built", remedy)


def _plan(manifest: Manifest, machine: Machine) -> Check:
    name, needed = "bundle memory", needed_bytes(manifest)
    if manifest.executor != "host" and machine.gpu == "discrete":
        found = "a card with its own memory, which only CUDA can tell; checked when it is taken"
        return Check(name, "ok", found, mib(needed))
    available, usable = machine.memory.obtainable, usable_bytes(machine)
    if available is None or usable is None:
        found = "unknown: /proc/meminfo has no MemAvailable"
        return Check(name, "warn", found, mib(needed), "mount /proc where edgevlm runs")
    found = f"{mib(usable)} usable ({mib(available)} available less {mib(headroom(available))})"
    if needed <= usable:
        return Check(name, "ok", found, mib(needed))
    short = f"{mib(needed)}, {mib(needed - usable)} more"
    limits = "lower --max-seq-len, --max-pixels or --slots"
    remedy = f"close other programs, or build with --memory-budget {usable >> 20}MiB ({limits})"
    if machine.is_jetson and machine.desktop_running:
        remedy = f"stop the desktop with `sudo systemctl isolate multi-user.target`, {remedy}"
    return Check(name, "fail", found, short, remedy)


def _allocations(manifest: Manifest, machine: Machine) -> Check:
    nbytes, what = largest_chunk(manifest)
    found = f"{mib(nbytes)} for {what} is the largest piece"
    if machine.l4t != BAD_L4T or manifest.executor == "host":
        return Check("bundle allocations", "ok", found)
    found += f", on L4T {BAD_L4T}"
    needed = f"pieces of at most {mib(BAD_L4T_CHUNK)}: L4T {BAD_L4T} refuses larger ones"
    status: Literal["warn", "fail"] = "fail" if nbytes > BAD_L4T_CHUNK else "warn"
    return Check("bundle allocations", status, found, needed, UPGRADE_L4T)
