"""The log on stderr: plain lines with a time, ids and counts only."""

from __future__ import annotations

import logging
import sys
from typing import Final

_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Writes to whatever stderr is at the moment: the prompt puts its own in place, so that lines appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr(level: str) -> None:
    """Show our own log from this level on, and of other libraries only warnings."""
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.basicConfig(level=max(logging.WARNING, logging.getLevelNamesMapping()[level]), handlers=[handler])
    logging.getLogger("memora").setLevel(level)
