"""One message as the offline model sees it, and the mark by which it knows its own.

Must not look at what a message says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OWN_MARKS: Final = ("(offline model)", "（離線模型）")
"""How every reply of `answer` begins, English and Chinese: what is marked so is never folded back as a fact."""


@dataclass(frozen=True)
class Utterance:
    """One message; `role` is "user" or "assistant"."""

    role: str
    content: str


def is_own_reply(text: str) -> bool:
    """Whether the text is something `answer` said."""
    return text.lstrip(" \t\r\n\"'「“").startswith(OWN_MARKS)
