"""`/v1/models`: the names that clients may ask for.

Owns which they are: `memora`, which stands for the configured model, and that model itself.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from memora.web.api import OWN_MODEL, Api, ApiOf
from memora.web.errors import READ_ERRORS, missing

router = APIRouter(prefix="/v1/models", tags=["models"], responses=READ_ERRORS)

_CREATED = 1_767_225_600
"""The start of 2026: clients want a time, and a name has none."""


@router.get("", operation_id="listModels")
async def list_models(api: ApiOf) -> dict[str, Any]:
    """All of them."""
    return {"object": "list", "data": [_record(name) for name in _names(api)]}


@router.get("/{model:path}", operation_id="retrieveModel")
async def retrieve_model(model: str, api: ApiOf) -> dict[str, Any]:
    """One of them."""
    if model not in _names(api):
        raise missing(f"The model '{model[:200]}' does not exist.", "model", "model_not_found")
    return _record(model)


def _names(api: Api) -> list[str]:
    return list(dict.fromkeys((OWN_MODEL, api.memora.settings.model)))


def _record(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": _CREATED, "owned_by": "memora"}
