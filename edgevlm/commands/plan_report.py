"""A memory plan as a JSON document and as a table for people."""

from typing import Any

from rich.console import Console
from rich.table import Table

from edgevlm.config import to_dict
from edgevlm.memory_plan import MemoryPlan


def plan_document(plan: MemoryPlan) -> dict[str, Any]:
    """The plan under the keys that scripts rely on. `fits` is null where there is no budget."""
    return {
        "fits": plan.fits,
        "budget_bytes": plan.budget_bytes,
        "total_bytes": plan.total_bytes,
        "pools": [
            {
                "name": pool.name,
                "bytes": pool.bytes,
                "source": pool.source,
                "formula": pool.formula,
                "reclaimable": pool.reclaimable,
            }
            for pool in plan.pools
        ],
        "limits": to_dict(plan.limits),
    }


def print_plan(console: Console, plan: MemoryPlan) -> None:
    """Every pool with its bytes, and what they add up to."""
    table = Table(box=None, pad_edge=False, title="memory plan", title_justify="left")
    table.add_column("pool", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("source", no_wrap=True)
    table.add_column("from", overflow="fold")
    for pool in plan.pools:
        size = human_bytes(pool.bytes)
        name = f"({pool.name})" if pool.reclaimable else pool.name
        table.add_row(name, size, pool.source, pool.formula)
    budget = ""
    if plan.budget_bytes is not None:
        budget = f"{'within' if plan.fits else 'OVER'} the budget {human_bytes(plan.budget_bytes)}"
    table.add_row("total", human_bytes(plan.total_bytes), "", budget, style="bold")
    console.print(table)
    if any(pool.reclaimable for pool in plan.pools):
        console.print("(in brackets: a mapped file, which the system can take back; not counted)")


def print_limits(console: Console, plan: MemoryPlan) -> None:
    """What the plan was sized for, in one line."""
    limits = plan.limits
    text = f"limits: {limits.max_seq_len:,} tokens in each of {limits.slots} slots, "
    text += f"prefill in chunks of {limits.max_prefill_chunk:,}"
    if limits.max_images:
        text += f", {limits.max_images} images of at most {limits.max_pixels:,} pixels"
    console.print(text)


def human_bytes(nbytes: int) -> str:
    """Bytes with a binary unit and three figures: "3.58 GiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000 or unit == "GiB":
            break
        size /= 1024
    digits = 0 if unit == "B" else max(0, 3 - len(str(int(size))))
    return f"{size:.{digits}f} {unit}"
