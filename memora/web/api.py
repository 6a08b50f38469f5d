"""What every route needs: the services, whose request it is, and what the headers of a turn say.

Owns how a turn is asked for, whichever API it came through. Must not know what a reply looks like.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Depends, Request

from memora.bootstrap import Memora
from memora.chat import TurnOptions, TurnResult
from memora.conversations import Answered, ConversationService, OnStart, Replayed, Started, TurnRequest
from memora.core.conversation import Conversation, pair_up
from memora.core.window import Context
from memora.llm import Emit
from memora.web.body import fingerprint
from memora.web.errors import invalid
from memora.web.turns import Outcome, RunningTurn, Turns, TurnTimes

OWN_MODEL: Final = "memora"
"""The name under which clients know the configured model."""

REPLAYED: Final = {"x-memora-replayed": "true"}
"""Says that a turn had been answered before."""

_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True, slots=True)
class Api:
    """The services behind the routes."""

    memora: Memora
    service: ConversationService
    turns: Turns

    @property
    def wait_seconds(self) -> float:
        """How long a turn waits for another one of its conversation."""
        return self.memora.settings.turn_wait_seconds

    @property
    def max_chars(self) -> int:
        """The longest message that is taken."""
        return self.memora.settings.max_message_chars

    def start(self, turn: TurnRequest, request: Request) -> RunningTurn:
        """Answer a turn; without a conversation, from what the request itself holds."""

        async def work(emit: Emit, on_start: OnStart) -> Outcome:
            if not turn.conversation_id:
                return Answered(await self._answer_once(turn, emit, on_start))
            return await self.service.respond(turn, emit, wait_seconds=self.wait_seconds, on_start=on_start)

        return self.turns.start(work, request.state.request_id)

    def details(self, turn: TurnRequest) -> dict[str, object]:
        """What is kept with the answer so that the same reply can be given again."""
        model = turn.model or self.memora.settings.model
        return {"response": turn.nonce, "created_at": int(time.time()), "model": model}

    async def preview(self, turn: TurnRequest) -> Context:
        """The context the turn would be answered from."""
        if turn.conversation_id:
            return await self.service.context_of(turn)
        return await self.memora.chat.preview(_history(turn), turn.text, _options(turn))

    async def _answer_once(self, turn: TurnRequest, emit: Emit, on_start: OnStart) -> TurnResult:
        async def tell(context: Context) -> None:
            await on_start(Started(0, 0, context))

        return await self.memora.chat.answer_once(_history(turn), turn.text, emit, _options(turn), tell)


def _history(turn: TurnRequest) -> Conversation:
    before = pair_up(turn.before)
    return Conversation("", message_count=len(before), tail=before)


def _options(turn: TurnRequest) -> TurnOptions:
    return TurnOptions(
        instructions=turn.instructions,
        model=turn.model,
        parameters=turn.parameters,
        answer_details={"metadata": dict(turn.metadata), **turn.details},
    )


async def api_of(request: Request) -> Api:
    """The services of the app that serves this request."""
    api: Api = request.app.state.api
    return api


async def owner_of(request: Request) -> str:
    """Whose request this is; the access rules have found out."""
    owner: str = request.state.owner
    return owner


ApiOf = Annotated[Api, Depends(api_of)]
OwnerOf = Annotated[str, Depends(owner_of)]


def model_of(name: str | None) -> str | None:
    """The model a client asks for; None for the configured one."""
    return None if name in (None, "", OWN_MODEL) else name


async def retry_fields(request: Request, owner: str) -> dict[str, Any]:
    """What tells a turn from the same one sent again: the key, the body, and whether the client says it is a retry.

    Raises:
        Refused: the key is not one.
    """
    key = request.headers.get("idempotency-key", "")
    if key and not _KEY.fullmatch(key):
        raise invalid("Idempotency-Key has to be 1 to 255 visible ASCII characters.", "Idempotency-Key")
    count = request.headers.get("x-stainless-retry-count", "0")
    return {
        "key": hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest() if key else "",
        "fingerprint": await fingerprint(request),
        "is_retry": count.isdecimal() and int(count[:4]) > 0,
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, whenever it was made: `details` are what was kept with it.

    `position` is that of the user's message; `created_at` is the conversation's, in ms.
    """

    text: str
    details: Mapping[str, Any]
    position: int = 0
    created_at: int = 0
    incomplete: str | None = None
    is_stored: bool = True
    is_replay: bool = False

    @property
    def input_tokens(self) -> int:
        """What was read for it."""
        return _number(self.details, "input_tokens")

    @property
    def output_tokens(self) -> int:
        """What was written."""
        return _number(self.details, "output_tokens")

    @property
    def news(self) -> dict[str, str]:
        """Memora's own metadata: what the answer was made from, and what waited for a fold after it."""
        folded, window = _number(self.details, "summarized_message_count"), _number(self.details, "window_messages")
        return {
            **news_of({name: _number(self.details, name) for name in _NEWS}),
            "memora_pending_messages": str(max(0, self.position + 2 - window - folded) if self.is_stored else 0),
        }


_NEWS: Final = ("gap_messages", "summarized_message_count", "summary_version", "context_tokens")


def news_of(figures: Mapping[str, int]) -> dict[str, str]:
    """Figures as metadata."""
    return {f"memora_{name}": str(figures[name]) for name in _NEWS}


def news_before(context: Context) -> dict[str, str]:
    """What is known before the model answers."""
    return news_of(
        {
            "gap_messages": context.gap_messages,
            "summarized_message_count": context.tail_start - context.gap_messages,
            "summary_version": context.summary_version,
            "context_tokens": context.counted_input_tokens,
        }
    )


def as_headers(news: Mapping[str, str]) -> dict[str, str]:
    """The same as headers."""
    return {f"x-{name.replace('_', '-')}": value for name, value in news.items()}


def answer_headers(answer: Answer, times: TurnTimes) -> dict[str, str]:
    """What the headers of a plain reply say."""
    return as_headers(answer.news) | (REPLAYED if answer.is_replay else {}) | timing(times)


def timing(times: TurnTimes) -> dict[str, str]:
    """What memory took, in ms, in the header that browsers and proxies know for that."""
    return {} if times.memory is None else {"server-timing": f"memory;dur={times.memory * 1e3:.2f}"}


def answer_of(outcome: Outcome, started: Started | None) -> Answer:
    """The answer that a turn came to."""
    if isinstance(outcome, Replayed):
        turn = outcome.turn
        said = turn.assistant
        return Answer(said.content, said.details or {}, turn.position, turn.created_at, said.incomplete, is_replay=True)
    result = outcome.result
    position, created_at = (started.position, started.created_at) if started else (0, 0)
    return Answer(
        result.text,
        result.details or {},
        position,
        created_at,
        result.incomplete,
        is_stored=bool(result.conversation_id),
    )


def _number(details: Mapping[str, Any], name: str) -> int:
    value = details.get(name)
    return value if isinstance(value, int) else 0
