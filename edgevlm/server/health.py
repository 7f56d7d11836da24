"""GET /health: the process answers. GET /health/ready: it takes requests. GET /metrics."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from edgevlm.server.metrics import CONTENT_TYPE
from edgevlm.server.service import Service

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """For a watchdog: always 200 while the process lives."""
    service: Service = request.app.state.service
    return {"status": "draining" if service.draining else "ok"}


@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """For a load balancer: 503 while shutting down or when the model has failed."""
    service: Service = request.app.state.service
    service.check_open()
    stats = service.engine.stats()
    full = stats.queued >= stats.max_queue
    document = {
        "status": "full" if full else "ready",
        "slots": stats.slots,
        "slots_busy": stats.slots_busy,
        "queued": stats.queued,
        "max_queue": stats.max_queue,
    }
    return JSONResponse(document, 503 if full else 200)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)
