"""A chat by lines: standard input is a pipe, a file or a terminal that can do nothing, and every line is a turn.

Owns how lines are read. A line ends at a line feed, with or without a carriage return before it; neither is part of the
message. A byte-order mark at the very start of the input is dropped, as it marks the encoding; anywhere else it is
text. Bytes that are no UTF-8 make the message invalid, never something else than what was sent.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.lowlevel

from memora.cli.exit import Exit, exit_code
from memora.cli.output import Output, obey
from memora.cli.session import Session
from memora.cli.words import Message, UnknownWord, Word, understand
from memora.errors import InvalidMessage, MemoraError

_READ_BYTES: Final = 64 * 1024
_MOST_UTF8_BYTES: Final = 4
"""No character takes more, so a line of more bytes than this for each allowed character is surely too long."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its end. `is_cut`: it went on for longer than any message may be, and the rest is dropped."""

    text: str
    is_cut: bool = False


class LineReader:
    """Reads a descriptor line by line without holding up the event loop, and with bounded memory."""

    def __init__(self, descriptor: int, *, max_chars: int) -> None:
        self._descriptor = descriptor
        self._most_bytes = max_chars * _MOST_UTF8_BYTES
        self._is_first = True

    async def lines(self) -> AsyncIterator[Line]:
        """Every line; the last one may lack its end."""
        buffer, is_cut = bytearray(), False
        while chunk := await self._read():
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                yield self._line(buffer + end, is_cut)
                buffer, is_cut = bytearray(), False
            buffer += rest
            if len(buffer) > self._most_bytes:
                # One byte more than allowed is kept: enough to see that it is too long.
                is_cut = True
                del buffer[self._most_bytes + 1 :]
        if buffer:
            yield self._line(buffer, is_cut)

    async def everything(self) -> Line:
        """All of the input as one message; the end of its last line is not part of it."""
        buffer = bytearray()
        while len(buffer) <= self._most_bytes and (chunk := await self._read()):
            buffer += chunk
        is_cut = len(buffer) > self._most_bytes
        return self._line(buffer.removesuffix(b"\n"), is_cut)

    def _line(self, line: bytearray, is_cut: bool) -> Line:
        if self._is_first:
            line = line.removeprefix(codecs.BOM_UTF8)
            self._is_first = False
        is_cut = is_cut or len(line) > self._most_bytes
        return Line(line.removesuffix(b"\r").decode("utf-8", "surrogateescape"), is_cut)

    async def _read(self) -> bytes:
        try:
            await anyio.wait_readable(self._descriptor)
        except PermissionError:
            # A file is always ready, and the event loop refuses to wait for one.
            await anyio.lowlevel.checkpoint()
        try:
            return os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return await self._read()
        except OSError:
            return b""  # the terminal behind it is gone


class LineChat:
    """Takes turns from lines. `worst` is the exit code so far; `on_ready` is called before each line is read."""

    def __init__(
        self, session: Session, output: Output, *, max_chars: int, on_ready: Callable[[], None] | None = None
    ) -> None:
        self._session = session
        self._output = output
        self._max_chars = max_chars
        self._on_ready = on_ready or _do_nothing
        self.worst: int = Exit.DONE

    async def converse(self) -> None:
        """Every line of standard input, until it ends or says exit. A turn that fails is followed by the next."""
        self._on_ready()
        async for line in self._reader().lines():
            entry = understand(line.text)
            if entry is Word.EXIT:
                return
            if line.text.strip():
                await self._take(entry, line.is_cut)
            self._on_ready()

    async def say(self, message: str) -> None:
        """One message; `-` is all of standard input."""
        line = await self._reader().everything() if message == "-" else Line(message)
        await self._take(Message(line.text), line.is_cut)

    def _reader(self) -> LineReader:
        return LineReader(sys.stdin.fileno(), max_chars=self._max_chars)

    async def _take(self, entry: Message | Word | UnknownWord, is_cut: bool) -> None:
        try:
            await self._act_on(entry, is_cut)
        except MemoraError as error:
            self._output.failed(error)
            self.worst = max(self.worst, exit_code(error))

    async def _act_on(self, entry: Message | Word | UnknownWord, is_cut: bool) -> None:
        match entry:
            case Word():
                await obey(entry, self._session, self._output)
            case UnknownWord():
                self._output.unknown(entry)
                self.worst = max(self.worst, Exit.WRONG_USE)
            case Message(text):
                if is_cut:
                    limit = f"{self._max_chars:,} characters are allowed (MEMORA_MAX_MESSAGE_CHARS)"
                    raise InvalidMessage(f"the message is too long: at most {limit}")
                self._output.answered(await self._session.reply(text, self._output.piece))


def _do_nothing() -> None:
    pass
