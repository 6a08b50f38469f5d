"""How the server says no: OpenAI's error body, its statuses and types, for every error there is.

Owns which status and type an error of Memora gets. Must not decide when one is due.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from memora import errors
from memora.errors import MemoraError
from memora.responses_wire import INVALID_REQUEST, error_body

SERVER_ERROR: Final = "server_error"

_UNEXPECTED_CODE: Final = "server_error"
_UNEXPECTED_MESSAGE: Final = "The server met an unexpected problem; its log has the request id."

_LOG: Final = logging.getLogger(__name__)
_LONGEST_RETRY_AFTER_SECONDS: Final = 120
"""The official client gives up at once when it is asked to wait longer."""


@dataclass(frozen=True, slots=True)
class Told:
    """An error as the client is told it."""

    status: int
    message: str
    kind: str = INVALID_REQUEST
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        return error_body(self.message, kind=self.kind, code=self.code, param=self.param)

    @property
    def is_unexpected(self) -> bool:
        """Whether it stands for an error that nobody meant to raise."""
        return self.code == _UNEXPECTED_CODE


class Refused(errors.CallerError):
    """A request that the server itself turns down; `told` is what the client hears."""

    def __init__(self, told: Told) -> None:
        super().__init__(told.message)
        self.told = told


def invalid(message: str, param: str | None, *, code: str | None = "invalid_value", status: int = 400) -> Refused:
    """The error for a request that cannot be understood; `param` names the part."""
    return Refused(Told(status, message, code=code, param=param))


def unsupported(param: str, what: str) -> Refused:
    """The error for something that OpenAI's API has and Memora has not."""
    return invalid(f"{what} not supported by Memora: leave '{param}' out.", param, code="unsupported_parameter")


def missing(message: str, param: str, code: str | None = None) -> Refused:
    """The error for something that is not there."""
    return invalid(message, param, code=code, status=404)


_NEVER_AGAIN: Final = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class _Rule:
    """What an error class becomes. `again` is False where the official client would retry in vain."""

    status: int
    kind: str = SERVER_ERROR
    param: str | None = None
    again: bool = True


_RULES: Final[Mapping[type[MemoraError], _Rule]] = {
    errors.InvalidId: _Rule(400, INVALID_REQUEST, "conversation"),
    errors.InvalidMessage: _Rule(400, INVALID_REQUEST, "input"),
    errors.ContextLengthExceeded: _Rule(400, INVALID_REQUEST, "input"),
    errors.ConversationNotFound: _Rule(404, INVALID_REQUEST, "conversation"),
    errors.ConversationDeleted: _Rule(409, INVALID_REQUEST, "conversation", again=False),
    errors.ConversationLocked: _Rule(409, INVALID_REQUEST, "conversation"),
    errors.ConversationMovedOn: _Rule(400, INVALID_REQUEST, "previous_response_id"),
    errors.MessageSummarized: _Rule(409, INVALID_REQUEST, "item_id", again=False),
    errors.IdempotencyKeyReused: _Rule(422, INVALID_REQUEST),
    errors.SettingsError: _Rule(500, again=False),
    errors.CallerError: _Rule(400, INVALID_REQUEST),
    errors.StoreUnavailable: _Rule(503),
    errors.StoreRefused: _Rule(503),
    errors.ConversationDamaged: _Rule(500, again=False),
    errors.StoreError: _Rule(500),
    errors.ModelTimeout: _Rule(504),
    errors.ModelDenied: _Rule(502, again=False),
    errors.ModelRefused: _Rule(502, again=False),
    errors.ModelError: _Rule(502),
    errors.MemoraError: _Rule(500),
}
"""The first class of an error's ancestry that is named here decides."""


def told_of(error: BaseException) -> Told:
    """What the client is told of an error; nothing of one that nobody expected."""
    if isinstance(error, Refused):
        return error.told
    if not isinstance(error, MemoraError):
        return Told(500, _UNEXPECTED_MESSAGE, SERVER_ERROR, _UNEXPECTED_CODE)
    rule = next(_RULES[kind] for kind in type(error).__mro__ if kind in _RULES)
    headers = {} if rule.again else dict(_NEVER_AGAIN)
    seconds = getattr(error, "retry_after", None)
    if seconds is not None and math.isfinite(seconds):
        headers["retry-after"] = str(min(max(math.ceil(seconds), 1), _LONGEST_RETRY_AFTER_SECONDS))
    return Told(rule.status, str(error), rule.kind, error.code, rule.param, headers)


def error_response(told: Told) -> Response:
    """The error as a reply."""
    return JSONResponse(told.body, told.status, dict(told.headers))


def install_error_handlers(app: FastAPI) -> None:
    """Let every error of the app leave it in OpenAI's shape."""
    app.add_exception_handler(MemoraError, _on_memora_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_memora_error(_: Request, error: Exception) -> Response:
    return error_response(told_of(error))


async def _on_invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101  # it is registered for nothing else
    return error_response(_told_of_problems([dict(problem) for problem in error.errors()]))


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  # it is registered for nothing else
    message = str(error.detail)
    if error.status_code in _ROUTING_MESSAGES:
        message = _ROUTING_MESSAGES[error.status_code]
    kind = SERVER_ERROR if error.status_code >= 500 else INVALID_REQUEST
    return error_response(Told(error.status_code, message, kind, headers=error.headers or {}))


async def _on_unexpected(request: Request, error: Exception) -> Response:
    log_unexpected(error, str(getattr(request.state, "request_id", "")))
    return error_response(told_of(error))


def log_unexpected(error: BaseException, request_id: str) -> None:
    """Where it happened and what kind it is, but not its text, which may hold what a user said."""
    trace, place = error.__traceback__, "?"
    while trace:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    _LOG.error("unexpected %s at %s (request %s)", type(error).__name__, place, request_id)


_ROUTING_MESSAGES: Final = {
    404: "There is nothing at this address: see /openapi.json.",
    405: "This address does not take that method: see /openapi.json.",
}


def _told_of_problems(problems: list[dict[str, Any]]) -> Told:
    """The problem that lies deepest says most: the others are of the types that were not meant."""
    problem = max(problems, key=lambda problem: len(problem["loc"]))
    where = problem["loc"][1:] if len(problem["loc"]) > 1 or problem["loc"][0] == "body" else problem["loc"]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where if _is_name(part))
    param = param.removeprefix(".")[:_MOST_PARAM_CHARACTERS]
    if problem["type"] == "json_invalid":
        return Told(400, f"The body is not JSON: {problem.get('ctx', {}).get('error', '')}.", code="invalid_json")
    if not param:
        return Told(400, "The body has to be a JSON object, sent as application/json.", code="invalid_type")
    code = "missing_required_parameter" if problem["type"] == "missing" else "invalid_type"
    return Told(400, f"Invalid '{param}': {problem['msg']}.", code=code, param=param)


_MOST_PARAM_CHARACTERS: Final = 100


def _is_name(part: object) -> bool:
    """Whether a step of pydantic's path is one of the request, not the name of a type that was tried."""
    return isinstance(part, int) or (isinstance(part, str) and part.isidentifier() and part not in _TYPE_NAMES)


_TYPE_NAMES: Final = frozenset({"str", "int", "float", "bool", "dict", "list", "ConversationRef"})


class ErrorDetail(BaseModel):
    """What went wrong: for people, and as names for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


Described = dict[int | str, dict[str, Any]]


def _described(*statuses: int) -> Described:
    return {status: {"model": ErrorBody, "description": HTTPStatus(status).phrase} for status in statuses}


READ_ERRORS: Final = _described(400, 401, 403, 404, 405, 422, 429, 500, 503)
"""What any route may answer besides what it is for."""

WRITE_ERRORS: Final = _described(408, 409, 413, 415)
"""And what one that changes something may."""

TURN_ERRORS: Final = WRITE_ERRORS | _described(502, 504)
"""And what one that asks the model may."""
