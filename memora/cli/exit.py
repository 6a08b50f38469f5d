"""How a command ends: its exit code and the one line that says why.

Owns the exit codes of the contract and the form of an error, for people and for programs. Must stay light: `--help`
imports it.
"""

from __future__ import annotations

import json
import os
import sys
from enum import IntEnum
from typing import TextIO

from memora.cli.streams import harmless
from memora.errors import (
    AddressUnavailable,
    CallerError,
    ConversationDeleted,
    ConversationNotFound,
    MemoraError,
    ModelDenied,
    ModelTimeout,
    ModelUnavailable,
    StoreRefused,
    StoreUnavailable,
)


class Exit(IntEnum):
    """Exit codes. A signal `n` ends a command with 128 + n."""

    DONE = 0
    FAILED = 1
    WRONG_USE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


_UNREACHABLE = (AddressUnavailable, StoreUnavailable, StoreRefused, ModelUnavailable, ModelTimeout, ModelDenied)
_NOT_THERE = (ConversationNotFound, ConversationDeleted)


def exit_code(error: MemoraError) -> Exit:
    """The exit code that goes with an error."""
    if isinstance(error, _UNREACHABLE):
        return Exit.UNREACHABLE
    if isinstance(error, CallerError) and not isinstance(error, _NOT_THERE):
        return Exit.WRONG_USE
    return Exit.FAILED


def error_line(error: MemoraError) -> str:
    """An error as people read it: one line, without its newline."""
    return f"memora: {harmless(' '.join(str(error).split()))}"


def error_record(code: str, message: str) -> str:
    """An error as programs read it: one JSON object on one line, without its newline."""
    return json.dumps({"type": "error", "code": code, "message": message}, ensure_ascii=False)


def report(error: MemoraError, *, as_json: bool, stream: TextIO | None = None) -> Exit:
    """Say what went wrong, on stderr unless told otherwise. Returns the exit code that goes with it."""
    line = error_record(error.code, str(error)) if as_json else error_line(error)
    (stream or sys.stderr).write(line + "\n")
    return exit_code(error)


def flush_output(code: int) -> int:
    """Write what is still kept back. Returns the exit code, which is another if nobody is there to read it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return close_broken_pipe()
    return code


def close_broken_pipe() -> Exit:
    """Whoever read our output has left: end quietly, also when Python flushes at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return Exit.FAILED
