"""GET /v1/models and /v1/models/{id}: the one model, under each of its names."""

from typing import Any

from fastapi import APIRouter, Request

from edgevlm.server.service import Service

router = APIRouter()


def document(service: Service, name: str) -> dict[str, Any]:
    """A model as OpenAI lists it, and what it was built for."""
    manifest = service.engine.bundle.manifest
    limits = service.limits
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "edgevlm",
        "model_type": manifest.model.model_type,
        "max_model_len": limits.max_seq_len,
        "max_images": limits.max_images,
        "max_pixels": limits.max_pixels,
        "tools": service.knows_tools,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Every name the model answers to."""
    service: Service = request.app.state.service
    return {"object": "list", "data": [document(service, name) for name in service.names]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One of them."""
    service: Service = request.app.state.service
    service.check_model(name)
    return document(service, name)
