"""What was typed in earlier chats, for the Up key: a private file in the data directory.

Owns that file. Each line remembers its conversation, so that deleting a conversation takes its lines along. A file that
cannot be read or written costs the Up key, never the chat.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

FILE_NAME: Final = "typed.jsonl"
_MOST_LINES: Final = 2_000
_KEPT_LINES: Final = 1_000
"""When the file has grown over the most, this many are kept."""

_LONGEST_KEPT: Final = 10_000
"""A longer text was pasted, and can be pasted again."""

_PRIVATE: Final = 0o600


def read_typed(directory: Path) -> list[str]:
    """What was typed, newest first; shortens a file that has grown too long."""
    path = directory / FILE_NAME
    records = _read(path)
    if len(records) > _MOST_LINES:
        records = records[-_KEPT_LINES:]
        _write(path, records)
    return [text for _, text in reversed(records)]


def append_typed(directory: Path, conversation_id: str, text: str) -> None:
    """Remember what was typed in a conversation."""
    if len(text) > _LONGEST_KEPT:
        return
    with suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory / FILE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _PRIVATE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_line(conversation_id, text))


def forget_typed(directory: Path, conversation_id: str) -> None:
    """Take everything typed in one conversation out of the file."""
    path = directory / FILE_NAME
    records = _read(path)
    kept = [record for record in records if record[0] != conversation_id]
    if len(kept) < len(records):
        _write(path, kept)


def _read(path: Path) -> list[tuple[str, str]]:
    records: list[tuple[str, str]] = []
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, TypeError):
                conversation_id, text = json.loads(line)
                records.append((str(conversation_id), str(text)))
    return records


def _write(path: Path, records: list[tuple[str, str]]) -> None:
    with suppress(OSError):
        new = path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _PRIVATE)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(_line(*record) for record in records)
        new.replace(path)


def _line(conversation_id: str, text: str) -> bytes:
    return json.dumps([conversation_id, text]).encode() + b"\n"
