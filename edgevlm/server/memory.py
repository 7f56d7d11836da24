"""GET /v1/memory: the plan's pools and the service's own lines, and what of them is used."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from edgevlm.config import to_dict
from edgevlm.server.service import Service
from edgevlm.vlm import peak_rss_bytes

router = APIRouter()


@router.get("/v1/memory")
async def memory(request: Request) -> dict[str, Any]:
    """The live ledger, in bytes."""
    return ledger(request.app.state.service)


def ledger(service: Service) -> dict[str, Any]:
    """`pools`: taken at start. `service`: bounds of what comes and goes with requests."""
    plan = service.engine.bundle.manifest.plan
    stats = service.engine.stats()
    used = {name: in_use for name, _, in_use in stats.pools}
    pools = [
        {
            "name": pool.name,
            "bytes": pool.bytes,
            "used_bytes": used.get(pool.name),
            "source": pool.source,
            "formula": pool.formula,
            "reclaimable": pool.reclaimable,
        }
        for pool in plan.pools
    ]
    lines = service.ledger()
    return {
        "pools": pools,
        "planned_bytes": plan.total_bytes,
        "service": [dataclasses.asdict(line) for line in lines],
        "service_bound_bytes": sum(line.bytes for line in lines),
        "service_held_bytes": service.intake.held,
        "rss_bytes": rss_bytes(),
        "peak_rss_bytes": peak_rss_bytes(),
        "allocations_after_start": stats.allocations_after_start,
        "slots": stats.slots,
        "slots_busy": stats.slots_busy,
        "queued": stats.queued,
        "limits": to_dict(plan.limits),
    }


def rss_bytes() -> int:
    """What this process has resident now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
