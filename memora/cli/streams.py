"""Standard input, output and error as commands use them: UTF-8 whatever the locale, styled only where that is wanted.

Owns what a terminal may be sent. Must stay light: `--help` imports it.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TextIO

_CONTROLS = re.compile(r"\r\n|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Everything a terminal could take as a command: all C0 and C1 controls but tab and line feed."""

_NARROWEST: Final = 20


def use_utf8() -> None:
    """Let all three streams speak UTF-8. What cannot be encoded is written as its escape, never as an error.

    Bytes on standard input that are no UTF-8 become lone surrogates, which no message may hold. A closed stream is
    replaced by nothing at all.
    """
    for name, errors in (("stdin", "surrogateescape"), ("stdout", "backslashreplace"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nowhere, "r" if name == "stdin" else "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def argument_text(argument: str) -> str:
    """A command line argument read as UTF-8, whatever the locale made of its bytes."""
    return os.fsencode(argument).decode("utf-8", "surrogateescape")


def harmless(text: str) -> str:
    """A text as a terminal may show it: its control characters become visible escapes."""
    return _CONTROLS.sub(_escaped, text)


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at this stream."""
    return not stream.closed and stream.isatty()


def is_dumb(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal can do nothing but show characters."""
    return environment.get("TERM", "").lower() in ("", "dumb", "unknown")


def columns() -> int:
    """Width of the terminal."""
    return max(shutil.get_terminal_size().columns, _NARROWEST)


@dataclass(frozen=True, slots=True)
class Style:
    """How text looks on one stream. `colored`: may carry colors; `guarded`: a terminal reads it, so no controls."""

    colored: bool = False
    guarded: bool = False

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Style:
        """What suits a stream: nothing for a pipe, no color under NO_COLOR or on a dumb terminal."""
        guarded = is_terminal(stream)
        colored = guarded and not environment.get("NO_COLOR") and not is_dumb(environment)
        return cls(colored, guarded)

    def data(self, text: str) -> str:
        """Text of users and models."""
        return harmless(text) if self.guarded else text

    def dim(self, text: str) -> str:
        """What is not looked at every time."""
        return self._wrapped(text, "2")

    def bold(self, text: str) -> str:
        """A heading."""
        return self._wrapped(text, "1")

    def warning(self, text: str) -> str:
        """What should be noticed."""
        return self._wrapped(text, "33")

    def error(self, text: str) -> str:
        """What went wrong."""
        return self._wrapped(text, "31")

    def good(self, text: str) -> str:
        """What is as it should be."""
        return self._wrapped(text, "32")

    def _wrapped(self, text: str, code: str) -> str:
        if not self.colored:
            return text
        return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else line for line in text.split("\n"))


def _escaped(match: re.Match[str]) -> str:
    found = match[0]
    return "\n" if found == "\r\n" else f"\\x{ord(found):02x}"
