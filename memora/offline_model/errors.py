"""How the offline model says no: OpenAI's error body and the statuses and codes that go with it.

Owns the wording of errors. Must not decide when one is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from memora.errors import CallerError
from memora.responses_wire import INVALID_REQUEST, error_body


class Rejected(CallerError):
    """A request the offline model answers with an HTTP error; `code` and `param` as in OpenAI's error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = code
        self.param = param
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        return error_body(str(self), code=self.error_code, param=self.param)


def scripted_error(status: int, code: str | None) -> dict[str, Any]:
    """The body OpenAI sends with a status; `code` picks another error of the same status."""
    code = code or _USUAL_CODES.get(status, "server_error" if status >= 500 else None)
    kind, message, param = _ERRORS.get(code or "", (_kind_of(status), "This error was scripted.", None))
    return error_body(message, kind=kind, code=code, param=param)


def _kind_of(status: int) -> str:
    return "server_error" if status >= 500 else INVALID_REQUEST


_USUAL_CODES: Final = {
    401: "invalid_api_key",
    403: "unsupported_country_region_territory",
    404: "model_not_found",
    429: "rate_limit_exceeded",
    500: "server_error",
    503: "server_is_overloaded",
}

_ERRORS: Final[dict[str, tuple[str, str, str | None]]] = {
    "invalid_api_key": (INVALID_REQUEST, "Incorrect API key provided.", None),
    "unsupported_country_region_territory": (
        "request_forbidden",
        "Country, region, or territory not supported.",
        None,
    ),
    "model_not_found": (INVALID_REQUEST, "The model does not exist or you do not have access to it.", "model"),
    "context_length_exceeded": (
        INVALID_REQUEST,
        "Your input exceeds the context window of this model. Please adjust your input and try again.",
        "input",
    ),
    "rate_limit_exceeded": ("requests", "Rate limit reached. Please try again later.", None),
    "insufficient_quota": (
        "insufficient_quota",
        "You exceeded your current quota, please check your plan and billing details.",
        None,
    ),
    "server_error": ("server_error", "The server had an error while processing your request.", None),
    "server_is_overloaded": ("server_error", "The server is currently overloaded. Please try again later.", None),
}
"""Code to type, message and parameter, as the real service words them."""
