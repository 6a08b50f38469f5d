"""What a conversation costs in tokens, by how many turns are folded at once.

    python benchmarks/economics.py [FILE] [--turns 200] [--batches 1,2,4,8] [--budgets 1000,2000,4000] [--json]

Replays conversations through the engine, with a real Redis and real HTTP, and a worker that always keeps up: after each
turn everything that is due is folded. FILE has one JSON object a line with `turns` of `user` and `assistant`; without
it a conversation is made up, in which every tenth turn names a marker. The endpoint answers what is in the file, and
its summaries are those of the offline model, which fill the cap, behind all markers it has seen. Tokens are counted
from the requests as they arrive, with the model's own vocabulary.

- *window alone*: what the answers would take with the last turns and no summary; *full history*: with everything.
- *as sent*: the same share of what the answers took without their summary. While turns gather to be folded together
  there are more of them in the window, which this counts as the window's and not as memory's.
- *same prefix*: the share of the answers' input that begins like the request before, which a server with a prefix
  cache need not read again. *cached*: what is left of it under the rule of the large providers, who cache from 1,024
  tokens on in steps of 128.
- *weighted*: tokens into models if a cached one costs a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os.path
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import anyio
from endpoint import Connection, plain, reply_of, stream_of

from memora.bootstrap import Memora, open_memora
from memora.core.conversation import Conversation, Message
from memora.core.prompts import EXISTING_SUMMARY_KEY, LIMITS_KEY, NEW_MESSAGES_KEY, ModelRequest
from memora.core.text import count_words
from memora.core.tokens import count_text_tokens, message_tokens, request_tokens
from memora.core.window import Context, select_context
from memora.embedded_redis import EmbeddedRedis
from memora.fold import Folded
from memora.offline_model.extractive import Utterance, summarise
from memora.settings import Settings

FIRST_CACHED_TOKENS: Final = 1_024
CACHED_STEP_TOKENS: Final = 128
CACHED_PRICE: Final = 0.1
TURNS_PER_MARKER: Final = 10
_MARKER: Final = re.compile(r"marker-\d+")
Talk = Sequence[tuple[str, str]]
"""What was said: the user's and the assistant's half of each turn."""


@dataclass
class Wire:
    """What the endpoint answers next, and what it was asked."""

    answer: str = ""
    answers: list[ModelRequest] = field(default_factory=list)
    folds: list[ModelRequest] = field(default_factory=list)
    summary_tokens: int = 0


@dataclass(frozen=True)
class Figures:
    """What the conversations took with one setting; tokens and turns are summed over them."""

    max_input_tokens: int
    batch_turns: int
    turns: int
    answer_tokens: int
    fold_tokens: int
    summary_tokens: int
    folds: int
    summaries_sent: int
    window_alone: int
    full_history: int
    same_prefix: int
    cached: int
    gap_turns: int
    gap_messages: int
    markers_missing: int

    @property
    def tokens_in(self) -> int:
        """Tokens into models, for answers and for folds."""
        return self.answer_tokens + self.fold_tokens

    @property
    def window_sent(self) -> int:
        """What the answers took without their summary: the window as it was."""
        return self.answer_tokens - self.summaries_sent

    @property
    def weighted(self) -> float:
        """The same if cached ones cost a tenth."""
        return self.tokens_in - self.cached * (1 - CACHED_PRICE)

    def as_record(self) -> dict[str, float]:
        """For `--json`."""
        return {**asdict(self), "tokens_in": self.tokens_in, "weighted": self.weighted}


class Playback(Connection):
    """Answers what it is told to, and summarizes as the offline model does, keeping every marker."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def answer(self, head: bytes, body: bytes) -> None:
        """Note the request and reply."""
        sent = json.loads(body)
        request = ModelRequest(sent["instructions"], tuple((item["role"], item["content"]) for item in sent["input"]))
        if b"/input_tokens" in head:
            self.send(plain({"object": "response.input_tokens", "input_tokens": _tokens(request)}))
            return
        if sent.get("stream"):
            self._wire.answers.append(request)
            self.send(stream_of(self._wire.answer))
            return
        self._wire.folds.append(request)
        summary = _summary(json.loads(request.messages[0][1]))
        self._wire.summary_tokens += count_text_tokens(summary)
        self.send(reply_of(summary))


def _summary(document: dict[str, Any]) -> str:
    """All markers so far, and what the offline model keeps, within the limits that the request names."""
    existing, new = document[EXISTING_SUMMARY_KEY], document[NEW_MESSAGES_KEY]
    said = " ".join([existing, *(message["content"] for message in new)])
    markers = list(dict.fromkeys(_MARKER.findall(said)))
    known = f"Known: {', '.join(markers)}. " if markers else ""
    kept = summarise(
        existing.partition(". ")[2] if existing.startswith("Known: ") else existing,
        [Utterance(message["role"], _MARKER.sub("it", message["content"])) for message in new],
        max_words=document[LIMITS_KEY]["words"] - count_words(known) - 1,
        max_tokens=document[LIMITS_KEY]["tokens"] - count_text_tokens(known) - 1,
        count_tokens=count_text_tokens,
        count_words=count_words,
    )
    return (known + kept).strip()


def spoken(turns: int) -> list[tuple[str, str]]:
    """A conversation that is made up: a learner tells things and asks; the answers have some hundred tokens."""
    return [(_question(number), _answer(number)) for number in range(turns)]


def _question(number: int) -> str:
    word, place = _WORDS[number % len(_WORDS)], _PLACES[number // 3 % len(_PLACES)]
    asked = f"I went to {place} with my friend number {number}. What does {word} mean, and how would I use it there?"
    return f"My code is marker-{number}. {asked}" if number % TURNS_PER_MARKER == 0 else asked


def _answer(number: int) -> str:
    word, other = _WORDS[number % len(_WORDS)], _WORDS[(number * 7 + 3) % len(_WORDS)]
    place = _PLACES[number // 3 % len(_PLACES)]
    return (
        f"You use {word} when something happens often or matters to you. For example: I think of {word} whenever I "
        f"walk through {place} in the evening. Another one: She wrote about {word} in her diary last week. Do not mix "
        f"it up with {other}, which people say more formally, in a letter or in a meeting. If you like, write a short "
        f"sentence about {place} with {word} in it, and I will tell you whether it sounds natural to a reader."
    )


_WORDS: Final = (
    *("journey", "travel", "voyage", "trip", "commute", "arrival", "departure", "luggage", "ticket", "platform"),
    *("borrow", "lend", "rent", "hire", "owe", "afford", "save", "spend", "earn"),
)
_PLACES: Final = ("the night market", "the old harbour", "my office", "the railway station", "a bakery", "the library")


async def replay(
    talks: Sequence[Talk], *, batches: Sequence[int], budgets: Sequence[int], recent_turns: int = 3
) -> list[Figures]:
    """The figures of every budget and batch."""
    found = []
    with tempfile.TemporaryDirectory(prefix="memora-economics-") as folder, EmbeddedRedis(Path(folder)) as redis:
        for budget in budgets:
            for batch in batches:
                settings = Settings(
                    _env_file=None,
                    redis_url=redis.url,
                    openai_api_key="benchmark",
                    max_input_tokens=budget,
                    max_recent_turns=recent_turns,
                    fold_batch_turns=batch,
                )
                found.append(await _one_setting(talks, settings))
    return found


async def _one_setting(talks: Sequence[Talk], settings: Settings) -> Figures:
    wire, totals = Wire(), dict.fromkeys(("alone", "full", "same", "cached", "gaps", "left_out", "sent", "missing"), 0)
    count = 0
    async with _playing(wire, settings) as memora:
        await memora.storage.redis.flushdb()
        for number, talk in enumerate(talks):
            first = len(wire.answers)
            for context in await _play(memora, wire, f"talk-{number}", talk):
                totals["gaps"] += context.gap_messages > 0
                totals["left_out"] += context.gap_messages
                totals["sent"] += context.tokens.summary
            requests = wire.answers[first:]
            same = [_same_prefix(*pair) for pair in pairwise(requests)]
            totals["same"] += sum(same)
            totals["cached"] += sum(map(_cached, same))
            totals["missing"] += _markers_missing(talk, requests)
            totals["alone"] += sum(_alone(talk, settings))
            totals["full"] += sum(_full(talk, settings.instructions_text))
            count += len(talk)
    return Figures(
        max_input_tokens=settings.max_input_tokens,
        batch_turns=settings.fold_batch_turns,
        turns=count,
        answer_tokens=sum(map(_tokens, wire.answers)),
        fold_tokens=sum(map(_tokens, wire.folds)),
        summary_tokens=wire.summary_tokens,
        folds=len(wire.folds),
        summaries_sent=totals["sent"],
        window_alone=totals["alone"],
        full_history=totals["full"],
        same_prefix=totals["same"],
        cached=totals["cached"],
        gap_turns=totals["gaps"],
        gap_messages=totals["left_out"],
        markers_missing=totals["missing"],
    )


@asynccontextmanager
async def _playing(wire: Wire, settings: Settings) -> AsyncIterator[Memora]:
    """The engine over an endpoint in this process."""
    server = await asyncio.get_running_loop().create_server(lambda: Playback(wire), "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        url = f"http://{host}:{port}/v1"
        async with open_memora(settings.model_copy(update={"openai_base_url": url})) as memora:
            yield memora


async def _play(memora: Memora, wire: Wire, conversation_id: str, talk: Talk) -> list[Context]:
    """Every turn, and after it all folds that are due; the context of each turn."""

    async def emit(_: str) -> None:
        return

    contexts = []
    for question, answer in talk:
        wire.answer = answer
        contexts.append((await memora.chat.reply(conversation_id, question, emit)).context)
        while isinstance(await memora.folds.fold(conversation_id), Folded):
            pass
    return contexts


def _tokens(request: ModelRequest) -> int:
    return request_tokens(request.instructions, request.messages)


def _alone(talk: Talk, settings: Settings) -> Iterator[int]:
    """Tokens of each request with the last turns as far as they fit, and no summary."""
    messages = [
        Message("user" if place % 2 == 0 else "assistant", text, count_text_tokens(text))
        for place, text in enumerate(text for turn in talk for text in turn)
    ]
    for number, (question, _) in enumerate(talk):
        tail = tuple(messages[2 * max(0, number - settings.max_recent_turns) : 2 * number])
        alone = Conversation("alone", "life", len(tail), tail=tail)
        yield select_context(alone, settings.instructions_text, question, settings.budget).counted_input_tokens


def _full(talk: Talk, instructions: str) -> Iterator[int]:
    """Tokens of each request with everything that was said before."""
    before = request_tokens(instructions, ())
    for question, answer in talk:
        asked = message_tokens(count_text_tokens(question))
        yield before + asked
        before += asked + message_tokens(count_text_tokens(answer))


def _same_prefix(last: ModelRequest, this: ModelRequest) -> int:
    """How many tokens this request begins with as the last one did."""
    shared = 0
    for before, now in zip(_parts(last), _parts(this), strict=False):
        if before != now:
            return shared + count_text_tokens(os.path.commonprefix([before[1], now[1]]))  # noqa: RUF071  # characters it is
        shared += message_tokens(count_text_tokens(now[1]))
    return shared


def _parts(request: ModelRequest) -> list[tuple[str, str]]:
    return [("system", request.instructions), *request.messages]


def _cached(shared: int) -> int:
    if shared < FIRST_CACHED_TOKENS:
        return 0
    return shared - (shared - FIRST_CACHED_TOKENS) % CACHED_STEP_TOKENS


def _markers_missing(talk: Talk, requests: Sequence[ModelRequest]) -> int:
    """How often a marker that was named before is not in a request."""
    named: list[str] = []
    missing = 0
    for (question, _), request in zip(talk, requests, strict=True):
        shown = set(_MARKER.findall(" ".join(content for _, content in request.messages)))
        missing += len([marker for marker in named if marker not in shown])
        named += _MARKER.findall(question)
    return missing


def read_talks(path: Path, most_turns: int, most_talks: int) -> list[Talk]:
    """The conversations of a file, each as far as asked for."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[:most_talks]]
    return [[(turn["user"], turn["assistant"]) for turn in row["turns"][:most_turns]] for row in rows]


def show(found: Sequence[Figures]) -> None:
    print(f"{found[0].turns:,} turns; shares are of the tokens into models with the window alone\n")
    print(
        f"{'budget':>7}{'batch':>6}{'folds':>7}{'answers':>9}{'folds in':>9}{'out':>8}{'share':>7}"
        f"{'as sent':>9}{'weighted':>9}{'same prefix':>12}{'cached':>8}{'full history':>13}"
        f"{'gap turns':>10}{'markers missing':>16}"
    )
    for row in found:
        print(
            f"{row.max_input_tokens:>7,}{row.batch_turns:>6}{row.folds:>7,}{row.answer_tokens:>9,}{row.fold_tokens:>9,}"
            f"{row.summary_tokens:>8,}{row.tokens_in / row.window_alone:>7.2f}"
            f"{row.tokens_in / row.window_sent:>9.2f}{row.weighted / row.window_alone:>9.2f}"
            f"{row.same_prefix / row.answer_tokens:>12.0%}{row.cached / row.answer_tokens:>8.0%}"
            f"{row.full_history / row.window_alone:>13.1f}{row.gap_turns:>10,}{row.markers_missing:>16,}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="conversations to replay; none: one that is made up")
    parser.add_argument("--turns", type=int, default=200, help="of each conversation at most")
    parser.add_argument("--conversations", type=int, default=8, help="of the file at most")
    parser.add_argument("--batches", type=_numbers, default=[1, 2, 4, 8], help="turns folded at once")
    parser.add_argument("--budgets", type=_numbers, default=[1_000, 2_000, 4_000], help="MEMORA_MAX_INPUT_TOKENS")
    parser.add_argument("--recent-turns", type=int, default=3, help="MEMORA_MAX_RECENT_TURNS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    file, turns = options.file, options.turns
    talks = read_talks(file, turns, options.conversations) if file else [spoken(turns)]
    settings = {"batches": options.batches, "budgets": options.budgets, "recent_turns": options.recent_turns}
    found = anyio.run(lambda: replay(talks, **settings))
    print(json.dumps([row.as_record() for row in found], indent=2)) if options.json else show(found)
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
