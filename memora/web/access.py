"""Who may speak to the server: keys, the Host and Origin of browsers, and the form of a request.

Owns what is refused before a route is looked at, and whose conversations a key sees. Must not know a single route but
those that are open to all.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from memora.errors import SettingsError
from memora.settings import Settings
from memora.web.refusals import Refusal

OPEN_PATHS: Final = frozenset(("/", "/livez", "/readyz", "/version"))
"""What needs no key: nothing of anybody's is in there."""

_OWNER_HEX_DIGITS: Final = 32
_LOCAL_NAMES: Final = frozenset(("localhost", "127.0.0.1", "::1"))

_BAD_KEY: Final = Refusal(
    401,
    "invalid_api_key",
    "The API key is missing or wrong: send one of MEMORA_API_KEYS as `Authorization: Bearer KEY`.",
    headers=((b"www-authenticate", b"Bearer"),),
)
_BAD_HOST: Final = Refusal(
    403, "host_not_allowed", "This server answers to localhost, 127.0.0.1 and [::1] only: check the Host header."
)
_BAD_ORIGIN: Final = Refusal(403, "origin_not_allowed", "Pages of another origin may not use this server.")
_NO_OPTIONS: Final = Refusal(
    405, "method_not_allowed", "OPTIONS is not answered: pages of another origin may not use this server."
)
_NOT_JSON: Final = Refusal(
    415, "unsupported_media_type", "The body must be JSON: send `Content-Type: application/json`."
)


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server: digests of the keys that open it, and whether it may only be called by a local name."""

    keys: tuple[bytes, ...]
    is_local: bool

    @classmethod
    def of(cls, settings: Settings) -> Access:
        """The rules that follow from the settings.

        Raises:
            SettingsError: the address can be reached from elsewhere, and there are no keys.
        """
        secret = settings.api_keys.get_secret_value() if settings.api_keys else ""
        keys = tuple(_digest(key) for key in dict.fromkeys(map(str.strip, secret.split(","))) if key)
        is_local = is_loopback(settings.host)
        if settings.api_keys and not keys:
            raise SettingsError("MEMORA_API_KEYS holds no key: write one or more, separated by commas")
        if not keys and not is_local:
            raise SettingsError(
                f"MEMORA_HOST={settings.host!r} can be reached from other machines: set MEMORA_API_KEYS, "
                "or use 127.0.0.1"
            )
        return cls(keys, is_local)

    def owner(self, authorization: str) -> str | None:
        """Whose conversations this header opens; "" where no keys are set, None if it opens nothing."""
        if not self.keys:
            return ""
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        # Every key is compared, so that the time does not tell which was nearly right.
        found = [hmac.compare_digest(digest, known) for known in self.keys]
        return digest.hex()[:_OWNER_HEX_DIGITS] if any(found) and scheme.lower() == "bearer" else None


class AccessGuard:
    """Lets a request through, with its owner in `request.state.owner`, or refuses it."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request; there is nothing else but HTTP here."""
        if scope["type"] == "http":
            refusal = self._judge(scope)
            await (refusal or self._app)(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _judge(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        refusal = self._judge_browser(scope["method"], headers)
        if refusal:
            return refusal
        owner = self._access.owner(headers.get("authorization", ""))
        if owner is None and scope["path"] not in OPEN_PATHS:
            return _BAD_KEY
        scope.setdefault("state", {})["owner"] = owner or ""
        return None if scope["method"] != "POST" or _is_json(headers) else _NOT_JSON

    def _judge_browser(self, method: str, headers: Headers) -> Refusal | None:
        """Refuse what a page of another origin could make a browser send."""
        host = headers.get("host", "")
        if self._access.is_local and _host_name(host) not in _LOCAL_NAMES:
            return _BAD_HOST
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return _BAD_ORIGIN
        return _NO_OPTIONS if method == "OPTIONS" else None


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@lru_cache
def _host_name(host: str) -> str:
    """The name in a Host header, without its port; "" if it cannot be read."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_json(headers: Headers) -> bool:
    kind = headers.get("content-type")
    if kind is None:
        return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    return kind.partition(";")[0].strip().lower() == "application/json"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
