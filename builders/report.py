"""The compiler's figures: summed for the bundle's report, and put into its plan.

Shared by `edgevlm build` and `edgevlm compile`; it needs no graph and no checkpoint.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from builders.engine import Compiler, StageReport
from edgevlm.bundle import BuiltOn
from edgevlm.device import Machine
from edgevlm.memory_plan import MemoryPlan, PoolName, with_report


def figures(reports: Sequence[StageReport], packed_int4: int) -> dict[str, Any]:
    """Sums and maxima over stages."""
    return {
        "weights_bytes": sum(r.weights_bytes for r in reports),
        "packed_int4_bytes": packed_int4,
        "scratch_bytes": max(max(r.scratch_bytes.values()) for r in reports),
        "seconds": round(sum(r.seconds for r in reports), 2),
        "peak_bytes": max(r.peak_bytes for r in reports),
        "stages": [dataclasses.asdict(r) for r in reports],
    }


def reported_plan(plan: MemoryPlan, engines: Mapping[str, Mapping[str, Any]]) -> MemoryPlan:
    """The plan with what the compiler says of weights and scratch."""
    scratch = max(engine["scratch_bytes"] for engine in engines.values())
    reported: dict[PoolName, tuple[int, str]] = {
        "activations": (scratch, "largest scratch of any stage and profile"),
    }
    names: tuple[tuple[PoolName, str], ...] = (
        ("weights.llm", "llm"),
        ("weights.vision", "vision"),
    )
    for pool, engine in names:
        if engine in engines:
            reported[pool] = (engines[engine]["weights_bytes"], "sum over stages")
    return with_report(plan, reported)


def compile_peak(engines: Mapping[str, Mapping[str, Any]]) -> int | None:
    """The most that any compiling child took; None where nothing was compiled."""
    return max((e["peak_bytes"] for e in engines.values() if e["stages"]), default=None)


def built_on(
    compiler: Compiler, engines: Mapping[str, Mapping[str, Any]], machine: Machine
) -> BuiltOn:
    """What the engines can run on: the compiler that was asked, and its GPU or this machine's."""
    said = next(iter(engines.values()))["stages"][0]["compiler"]
    capability = compiler.compute_capability
    if capability is None:
        return BuiltOn(said.rpartition(" ")[2], machine.compute_capability, machine.l4t)
    digits = capability.removeprefix("SM")
    return BuiltOn(said.rpartition(" ")[2], f"{digits[:-1]}.{digits[-1]}")
