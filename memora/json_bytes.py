"""JSON as bytes: what goes over a wire or into Redis, compact and in UTF-8.

Owns the one way in which it is written and read here. Must not know what is in it.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json, to_json


def encode_json(value: object) -> bytes:
    """Compact UTF-8; characters stand for themselves.

    Raises:
        ValueError: it is no JSON value, or a text in it holds half of a character.
    """
    return to_json(value)


def decode_json(data: bytes) -> Any:
    """The value, which may hold halves of characters if they were escaped one by one.

    Raises:
        ValueError: it is not JSON in UTF-8. RecursionError: it is nested too deep.
    """
    try:
        return from_json(data)
    except ValueError:
        # The quick one takes no halves of characters, and nothing that is nested deep.
        return json.loads(data.decode())
