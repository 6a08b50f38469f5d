"""The page at `/`: what this server is and how to use it. One file, no script, nothing loaded from elsewhere.

Owns what a browser may do with it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

_STYLE: Final = re.compile("<style>(.*?)</style>", re.DOTALL)


class Page:
    """The page, read once."""

    def __init__(self) -> None:
        self._text = (resources.files("memora.web") / "static" / "index.html").read_text("utf-8")
        style = _STYLE.search(self._text)
        digest = hashlib.sha256((style[1] if style else "").encode()).digest()
        self._policy = "; ".join(
            (
                "default-src 'none'",
                f"style-src 'sha256-{base64.b64encode(digest).decode()}'",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            )
        )

    async def show(self, request: Request) -> Response:
        """The page, with the address it was asked for in its examples."""
        host = html.escape(request.headers.get("host", "127.0.0.1:8000"))
        return HTMLResponse(self._text.replace("HOST", host), headers={"content-security-policy": self._policy})
