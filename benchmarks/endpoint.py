"""A model endpoint that costs next to nothing, so that what is measured is the client.

    python benchmarks/endpoint.py [--first-seconds 0.3] [--reply-seconds 1] [--summary-seconds 2] [--spread 0.3]

Prints its address and serves until it is stopped. Every stream has the events and the size of a real one, put together
before the first request; `/instant/v1` sends them at once, `/paced/v1` word by word, in times that are spread by a
share around the given ones. The first word of each answer is the moment at which the last byte of its request was
here: nanoseconds of the monotonic clock, which all processes of a machine share. It does not look into a request
further than to see whether a stream is wanted, and it does not count tokens: `usage` is null.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from typing import Final, cast

import anyio

from memora.cli.runner import event_loop
from memora.responses_wire import (
    Head,
    ended,
    item_done,
    message_item,
    numbered,
    output_text,
    response_object,
    starting_events,
    text_added,
    text_delta,
    text_done,
)

STAMP_DIGITS: Final = 20
WORDS: Final = 20
"""Pieces of an answer, the first of which is the stamp: a short answer at the pace of the usual models."""

SUMMARY: Final = (
    "The user lives in Taipei, works in a bakery and takes the TOEIC next month. They want short examples and no "
    "grammar terms. They asked about the present perfect, three B1 words and the difference between journey and travel."
)
_PLACE: Final = "#" * STAMP_DIGITS
_WORDS: Final = (f"{_PLACE} ", *(f"word{number} " for number in range(1, WORDS)))
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END: Final = b"0\r\n\r\n"


def stream_parts(pieces: Sequence[str]) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """The events of an answer, encoded: before the first piece, the pieces, after the last."""
    head = Head("resp_benchmark", 1, "benchmark")
    text = "".join(pieces)
    item = message_item("msg_benchmark", "assistant", "completed", [output_text(text)])
    started = response_object(head, "in_progress")
    before = [*starting_events(started, message_item("msg_benchmark", "assistant", "in_progress", []))]
    before.append(text_added("msg_benchmark"))
    deltas = [text_delta("msg_benchmark", piece) for piece in pieces]
    whole = response_object(head, "completed", output=[item])
    after = [*text_done("msg_benchmark", text), item_done(item), ended(whole)]
    encoded = [numbered(number, event).encode() for number, event in enumerate([*before, *deltas, *after])]
    return encoded[: len(before)], encoded[len(before) : -len(after)], encoded[-len(after) :]


def stream_of(*pieces: str) -> bytes:
    """A whole reply that streams an answer at once."""
    return STREAM_HEAD + chunk(b"".join(b"".join(part) for part in stream_parts(pieces))) + END


def reply_of(text: str) -> bytes:
    """A whole reply without a stream."""
    item = message_item("msg_benchmark", "assistant", "completed", [output_text(text)])
    return plain(response_object(Head("resp_benchmark", 1, "benchmark"), "completed", output=[item]))


def chunk(data: bytes) -> bytes:
    """A chunk of a body of unknown length."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(value: object) -> bytes:
    """A whole JSON reply."""
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


_BEFORE, _PIECES, _AFTER = stream_parts(_WORDS)
_INSTANT = stream_of(*_WORDS)
_SUMMARY = reply_of(SUMMARY)
_COUNT = plain({"object": "response.input_tokens", "input_tokens": 500})


class Connection(asyncio.Protocol):
    """One connection: requests in, replies out, one after the other."""

    def __init__(self) -> None:
        self._received = b""
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer as soon as the request is whole; clients send the next one only after the reply."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if end and length and len(body) >= int(length[1]):
            self._received = b""
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        """Answer a request."""
        raise NotImplementedError

    def send(self, data: bytes) -> None:
        """Write a part of a reply, unless nobody reads it any more."""
        if not self._transport.is_closing():
            self._transport.write(data)


class Stamping(Connection):
    """Answers with the moment at which the request was here."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self._options = options

    def answer(self, head: bytes, body: bytes) -> None:
        """Send what there is for this path, at once or paced."""
        stamp = b"%0*d" % (STAMP_DIGITS, time.monotonic_ns())
        path = head[: head.index(b"\r\n")]
        spread = random.uniform(1 - self._options.spread, 1 + self._options.spread)
        paced = b"/paced/" in path
        if b"/input_tokens" in path:
            self.send(_COUNT)
        elif b'"stream":true' not in body.replace(b'": ', b'":'):
            self._loop.call_later(self._options.summary_seconds * spread * paced, self.send, _SUMMARY)
        elif paced:
            self._pace(stamp, spread)
        else:
            self.send(_INSTANT.replace(_PLACE.encode(), stamp))

    def _pace(self, stamp: bytes, spread: float) -> None:
        """The first word after the time to first token, the others evenly until the reply has taken its time."""
        first, whole = self._options.first_seconds * spread, self._options.reply_seconds * spread
        now = self._loop.time()
        self.send(STREAM_HEAD + b"".join(map(chunk, _BEFORE)))
        moments = [now + first + (whole - first) * number / (WORDS - 1) for number in range(WORDS)]
        pieces = [chunk(piece.replace(_PLACE.encode(), stamp)) for piece in _PIECES]
        pieces[-1] += b"".join(chunk(event.replace(_PLACE.encode(), stamp)) for event in _AFTER) + END
        self._send_each(iter(zip(moments, pieces, strict=True)))

    def _send_each(self, pieces: Iterator[tuple[float, bytes]]) -> None:
        """Send one after the other: timers of nearly the same moment may change places."""
        if (piece := next(pieces, None)) and not self._transport.is_closing():
            self._loop.call_at(piece[0], self._send_one_of, piece[1], pieces)

    def _send_one_of(self, piece: bytes, pieces: Iterator[tuple[float, bytes]]) -> None:
        self.send(piece)
        self._send_each(pieces)


async def serve(options: argparse.Namespace) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: Stamping(options), "127.0.0.1", options.port, backlog=2_048
    )
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--first-seconds", type=float, default=0.3)
    parser.add_argument("--reply-seconds", type=float, default=1.0, help="of the whole answer")
    parser.add_argument("--summary-seconds", type=float, default=2.0)
    parser.add_argument("--spread", type=float, default=0.3, help="share by which these times vary either way")
    options = parser.parse_args()
    anyio.run(serve, options, backend_options=event_loop())


if __name__ == "__main__":
    main()
