"""Will it fit, and what would? All that is said of one model on one device, as data."""

from dataclasses import dataclass
from typing import Any

from builders.blocks import WeightPolicy
from builders.devices import Device, find_device, planning_target
from builders.limits import BuildOptions, Planned, change_text, make_plan
from builders.planner import MIB
from builders.presets import NamedModel, find_model
from builders.projection import (
    Figure,
    Fit,
    Projection,
    build_peak,
    disk,
    kv_bytes_per_token,
    load_peak,
    project,
    what_fits,
)
from builders.targets import Target
from edgevlm.commands.plan_report import plan_document
from edgevlm.config import to_dict
from edgevlm.errors import BuildError

COMPARED_SLOTS = (1, 2, 4)


@dataclass(frozen=True)
class Report:
    """All that is printed, drawn and written about one plan."""

    model: NamedModel
    device: Device
    target: Target
    lowering: str
    options: BuildOptions
    budget: Figure
    planned: Planned
    projection: Projection
    fits: tuple[Fit, ...]
    kv_bytes_per_token: int
    load_peak: Figure
    build_peak: Figure
    disk: Figure


def report(
    model_name: str, device_name: str, options: BuildOptions, executor: str | None = None
) -> Report:
    """Everything about one model on one device. Raises BuildError."""
    model, device = find_model(model_name), find_device(device_name)
    target = planning_target(device, executor)
    lowering = options.lowering or target.lowerings[0]
    if lowering not in target.lowerings:
        raise BuildError(
            f"{device.title} has no lowering {lowering!r}; it has {', '.join(target.lowerings)}"
        )
    budget = budget_on(device, options)
    planned = make_plan(
        model.config, options, target, lowering, budget.bytes, model.tokenizer_bytes
    )
    host = target.executor == "host"
    return Report(
        model=model,
        device=device,
        target=target,
        lowering=lowering,
        options=options,
        budget=budget,
        planned=planned,
        projection=project(planned.model, planned.plan, target, device),
        fits=tuple(what_fits(planned, model.config, budget.bytes, COMPARED_SLOTS)),
        kv_bytes_per_token=kv_bytes_per_token(model.config.text, host),
        load_peak=load_peak(planned.plan, host),
        build_peak=build_peak(
            model.config,
            WeightPolicy(options.weights, options.group_size),
            target,
            model.tokenizer_bytes,
        ),
        disk=disk(planned.plan),
    )


def budget_on(device: Device, options: BuildOptions) -> Figure:
    """What may be used: the device's memory, or less where --memory-budget says so."""
    usable = device.usable_bytes
    formula = f"{device.memory_bytes:,} ({device.memory_source})"
    if device.os_bytes:
        formula += f" - {device.os_bytes:,} ({device.os_source})"
    if options.memory_budget is not None:
        if options.memory_budget <= usable:
            usable, formula = options.memory_budget, "--memory-budget"
        else:
            formula += ", which is less than --memory-budget"
    if options.reserve:
        formula += f" - --reserve {options.reserve:,}"
    return Figure(max(0, usable - options.reserve), formula)


def document(found: Report) -> dict[str, Any]:
    """The keys of `inspect`, and what only a plan has."""
    planned, device = found.planned, found.device
    ledger = plan_document(planned.plan)
    total = planned.plan.total_bytes
    for pool in ledger["pools"]:
        counted = total and not pool["reclaimable"]
        pool["share"] = round(pool["bytes"] / total, 4) if counted else None
    return {
        **ledger,
        "model": found.model.name,
        "model_source": found.model.source,
        "model_type": found.model.config.model_type,
        "target": found.target.name,
        "executor": found.target.executor,
        "lowering": found.lowering,
        "weights": found.options.weights,
        "budget_formula": found.budget.formula,
        "left_bytes": found.budget.bytes - total,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "image_tokens": image_tokens(found),
        "load_peak": to_dict(found.load_peak),
        "build_peak": to_dict(found.build_peak),
        "disk": to_dict(found.disk),
        "what_fits": to_dict(found.fits),
        "projected": to_dict(found.projection),
        "device": {
            **to_dict(device),
            "usable_bytes": device.usable_bytes,
        },
        "suggestions": [
            to_dict(change) | {"text": change_text(change)} for change in planned.changes
        ],
        "notes": notes(found),
    }


def image_tokens(found: Report) -> int:
    """Tokens of the largest picture that the plan admits; 0 for a model that reads text only."""
    limits = found.planned.plan.limits
    return found.planned.wishes.image_tokens(limits.max_pixels) if limits.max_pixels else 0


def notes(found: Report) -> list[str]:
    """What a person should know before believing the figures."""
    limits, tokens = found.planned.plan.limits, image_tokens(found)
    said = []
    if tokens >= limits.max_seq_len:
        said.append(
            f"the largest picture takes {tokens:,} tokens and a slot holds {limits.max_seq_len:,}: "
            "it would be refused; raise --max-seq-len or lower --max-pixels"
        )
    if found.target.executor != "host":
        said.append(
            "planned from formulas, not seen on the device; a build replaces weights and "
            "activations by what the compiler reports"
        )
    if found.target.executor == "tensorrt" and found.lowering == "native":
        said.append("lowering native needs JetPack 7.2; for JetPack 6 plan with --lowering classic")
    if found.build_peak.bytes > found.device.usable_bytes:
        said.append(
            f"building on the device would need {found.build_peak.bytes // MIB:,} MiB, more than "
            "it has: build elsewhere"
        )
    return said
