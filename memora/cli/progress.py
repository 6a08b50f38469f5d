"""How far long work is: one line that is written over on a terminal, elsewhere a line now and then.

Owns how it is shown. What is said is the command's matter.
"""

from __future__ import annotations

import sys
import time
from typing import Final, TextIO

from memora.cli.streams import is_dumb, is_terminal

_TERMINAL_SECONDS: Final = 0.1
_LOG_SECONDS: Final = 10.0
"""Where nobody watches, only long work says how far it is."""


class Progress:
    """What is said of one piece of work."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._in_place = is_terminal(stream) and not is_dumb()
        self._every = _TERMINAL_SECONDS if self._in_place else _LOG_SECONDS
        self._shown_at = time.monotonic()
        self._is_shown = False

    @property
    def is_due(self) -> bool:
        """Whether the last time was long enough ago to say something again."""
        return time.monotonic() - self._shown_at >= self._every

    def say(self, text: str) -> None:
        """Say it now."""
        self._shown_at = time.monotonic()
        self._is_shown = True
        self._stream.write(f"\r\x1b[K{text}" if self._in_place else f"memora: {text}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Leave nothing of it on a terminal."""
        if self._is_shown and self._in_place:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
