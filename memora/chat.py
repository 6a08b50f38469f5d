"""One chat turn: load, select, stream the answer, store the turn. The fold is asked for by the same script that stores.

Owns the order of these steps and the figures of a turn. Two round trips to Redis, none of them while the model talks.
Must not know who is asking or how the answer is shown.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import anyio

from memora.core.conversation import MESSAGES_PER_TURN, Conversation, Message, Usage, check_text, is_blank
from memora.core.tokens import DEFAULT_VOCABULARY, Calibration, count_text_tokens, message_tokens, vocabulary_for
from memora.core.window import Budget, Context, most_useful_messages, select_context, select_window
from memora.errors import ContextLengthExceeded, ModelError, OutputUnusable, SettingsError
from memora.llm import Emit, ModelClient, ModelReply
from memora.settings import Settings
from memora.store import Appended, ConversationStore, Turn

_NEAR_THE_EDGE: Final = 0.9
"""From this share of the budget on, `auto` lets the endpoint count."""

_COUNT_AGAIN_SECONDS: Final = 60.0
_MAX_RECOUNTS: Final = 3
Result = TypeVar("Result")
OnContext = Callable[[Context], Awaitable[None]]
"""Is told what is about to be sent."""


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """What a turn may ask for beyond its text.

    `turn_id` makes a repeated call safe. `instructions` and `model` take the place of the settings'; `parameters` are
    passed on to the model. `before` are whole turns that go into the history in front of this one. `lock_token` and
    `owner` are for conversations that are shared; `request_details` and `answer_details` are kept with the messages.
    """

    turn_id: str = ""
    instructions: str | None = None
    model: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    before: tuple[Message, ...] = ()
    lock_token: str = ""
    owner: str = ""
    request_details: Mapping[str, object] | None = None
    answer_details: Mapping[str, object] | None = None


_NO_OPTIONS: Final = TurnOptions()


@dataclass(frozen=True, slots=True)
class TurnStats:
    """The figures of one turn, in messages and tokens. `actual_input_tokens` is None if the model did not say."""

    stored_messages: int
    summarized_messages: int
    newly_summarized_messages: int
    pending_messages: int
    gap_messages: int
    context_messages: int
    counted_input_tokens: int
    actual_input_tokens: int | None
    output_tokens: int
    summary_update_tokens: int
    session_total_tokens: int
    summary_version: int


@dataclass(frozen=True, slots=True)
class TurnResult:
    """A stored turn: the answer, what it was made from, and what it cost. `details` are kept with the answer."""

    conversation_id: str
    text: str
    context: Context
    stats: TurnStats
    incomplete: str | None = None
    details: Mapping[str, object] | None = None


class ChatService:
    """Answers turns. Holds no state of any conversation; what it learns about token counts is per model."""

    def __init__(self, settings: Settings, store: ConversationStore, client: ModelClient) -> None:
        self._settings = settings
        self._store = store
        self._client = client
        self._calibrations: dict[str, Calibration] = {}
        self._count_again_at = -math.inf

    async def reply(
        self, conversation_id: str, text: str, emit: Emit, options: TurnOptions = _NO_OPTIONS
    ) -> TurnResult:
        """Answer one message; pieces of the answer go to `emit` as they arrive.

        Nothing is stored unless the whole turn is.

        Raises:
            CallerError: the message cannot be taken. StoreError. ModelError: there is no answer; send it again.
        """
        check_text(text, self._settings.max_message_chars)
        conversation = await self._store.load(conversation_id, self.most_messages)
        return await self.answer(conversation, text, emit, options)

    async def answer(
        self,
        conversation: Conversation,
        text: str,
        emit: Emit,
        options: TurnOptions = _NO_OPTIONS,
        on_context: OnContext | None = None,
    ) -> TurnResult:
        """Answer one message of a conversation that is loaded already, as `reply` does."""
        check_text(text, self._settings.max_message_chars)
        continued = _continued(conversation, options.before)
        context = await self._select(continued, text, options)
        if on_context:
            await on_context(context)
        reply = await self._stream(context, emit, options)
        turn = self._turn(continued, context, reply, options)
        # A finished answer is stored even if nobody waits for it any more; the store has a deadline of its own.
        appended = await _to_its_end(self._store.append(conversation.id, turn))
        return TurnResult(
            conversation_id=conversation.id,
            text=reply.text,
            context=context,
            stats=_stats(context, reply, turn, appended),
            incomplete=turn.assistant.incomplete,
            details=turn.assistant.details,
        )

    async def answer_once(
        self,
        history: Conversation,
        text: str,
        emit: Emit,
        options: TurnOptions,
        on_context: OnContext | None = None,
    ) -> TurnResult:
        """Answer one message of a history that the caller keeps; nothing is stored."""
        check_text(text, self._settings.max_message_chars)
        context = await self._select(history, text, options)
        if on_context:
            await on_context(context)
        reply = await self._stream(context, emit, options)
        turn = self._turn(history, context, reply, options)
        nothing = Appended(0, 0, 0, 0, 0, 0, Usage(turn.input_tokens, turn.output_tokens))
        return TurnResult(
            conversation_id="",
            text=reply.text,
            context=context,
            stats=_stats(context, reply, turn, nothing),
            incomplete=turn.assistant.incomplete,
            details=turn.assistant.details,
        )

    @property
    def most_messages(self) -> int:
        """More messages of a tail than this can never be sent."""
        return most_useful_messages(self._settings.budget)

    async def preview(self, conversation: Conversation, text: str, options: TurnOptions = _NO_OPTIONS) -> Context:
        """The context that the next answer would be made from, if it were this message; nothing is sent."""
        continued = _continued(conversation, options.before)
        return select_context(continued, self._instructions(options), text, self._budget(options))

    def _instructions(self, options: TurnOptions) -> str:
        return self._settings.instructions_text if options.instructions is None else options.instructions

    def _model(self, options: TurnOptions) -> str:
        return options.model or self._settings.model

    def _budget(self, options: TurnOptions) -> Budget:
        model = self._model(options)
        calibration = self._calibrations.get(model, Calibration())
        return replace(self._settings.budget, vocabulary=vocabulary_for(model), calibration=calibration)

    async def _stream(self, context: Context, emit: Emit, options: TurnOptions) -> ModelReply:
        """Stream the answer, and learn how the model counts from what it reports."""
        model = self._model(options)
        reply = await self._client.stream(
            context.request,
            emit,
            model=model,
            timeout_seconds=self._settings.answer_timeout_seconds,
            parameters=options.parameters,
        )
        if reply.input_tokens is not None:
            known = self._calibrations.get(model, Calibration())
            self._calibrations[model] = known.observe(context.tokens.total, reply.input_tokens)
        return reply

    async def _select(self, conversation: Conversation, text: str, options: TurnOptions) -> Context:
        """Select a context, and let the endpoint count it where the settings ask for that."""
        instructions, model, budget = self._instructions(options), self._model(options), self._budget(options)
        context = select_context(conversation, instructions, text, budget)
        for _ in range(_MAX_RECOUNTS):
            counted = await self._count(context, model)
            if counted is None:
                return context
            if counted <= budget.max_input_tokens:
                return replace(context, counted_input_tokens=counted)
            calibration = budget.calibration.observe(context.tokens.total, counted)
            self._calibrations[model] = calibration
            budget = replace(budget, calibration=calibration)
            context = select_context(conversation, instructions, text, budget)
        raise ContextLengthExceeded(
            "the endpoint counts more tokens than the budget allows whatever is left out: raise MEMORA_MAX_INPUT_TOKENS"
        )

    async def _count(self, context: Context, model: str) -> int | None:
        """What the endpoint counts; None where the local count is enough."""
        mode = self._settings.token_counter
        if mode == "auto" and anyio.current_time() < self._count_again_at:
            return None
        near = context.counted_input_tokens >= self._settings.max_input_tokens * _NEAR_THE_EDGE
        if mode == "local" or (mode == "auto" and not near):
            return None
        try:
            counted = await self._client.count_input_tokens(context.request, model=model)
        except ModelError:
            if mode == "api":
                raise
            # The local count will do; who hangs is not asked for a while, so that the next answers do not wait for it.
            self._count_again_at = anyio.current_time() + _COUNT_AGAIN_SECONDS
            return None
        if counted is None and mode == "api":
            raise SettingsError(
                "MEMORA_TOKEN_COUNTER=api needs an endpoint that counts input tokens, and this one does not: use auto"
            )
        return counted

    def _turn(self, conversation: Conversation, context: Context, reply: ModelReply, options: TurnOptions) -> Turn:
        """The turn as it is stored.

        Raises:
            OutputUnusable: the answer is empty, or broke off for another reason than its length.
        """
        incomplete = reply.problem.removeprefix("incomplete: ") if reply.problem.startswith("incomplete") else None
        if is_blank(reply.text) or (incomplete and incomplete != "max_output_tokens"):
            raise OutputUnusable(f"the model gave no answer ({reply.problem or 'it is empty'}): nothing was stored")
        budget = self._budget(options)
        vocabulary = None if budget.vocabulary == DEFAULT_VOCABULARY else budget.vocabulary
        asked = context.tokens.message - message_tokens(0)
        tokens = count_text_tokens(reply.text, budget.vocabulary)
        input_tokens = context.counted_input_tokens if reply.input_tokens is None else reply.input_tokens
        output_tokens = tokens if reply.output_tokens is None else reply.output_tokens
        user = Message("user", context.message, asked, vocabulary=vocabulary, details=options.request_details)
        assistant = Message(
            "assistant",
            reply.text,
            tokens,
            phase=reply.phase,
            incomplete=incomplete,
            vocabulary=vocabulary,
        )
        newest = (*conversation.tail, user, assistant)
        window = select_window(newest, conversation.summary.text, context.instructions, budget)
        if context.gap_messages:
            # Nothing gathers where something had to be left out.
            window = replace(window, most_messages=window.messages)
        kept = window.holding(conversation.unsummarized_messages + MESSAGES_PER_TURN)
        figures = {"input_tokens": input_tokens, "output_tokens": output_tokens, "window_messages": kept}
        details = _answer_details(options, self._model(options), context, figures)
        return Turn(
            turn_id=options.turn_id or secrets.token_hex(16),
            answered_in=conversation.generation,
            user=user,
            assistant=replace(assistant, details=details),
            context=context,
            window_messages=window.messages,
            most_window_messages=window.most_messages,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            before=options.before,
            lock_token=options.lock_token,
            owner=options.owner,
        )


def _continued(conversation: Conversation, before: tuple[Message, ...]) -> Conversation:
    """The conversation as if these turns were in its history already."""
    if not before:
        return conversation
    count = conversation.message_count + len(before)
    return replace(conversation, message_count=count, tail=(*conversation.tail, *before))


def _answer_details(
    options: TurnOptions, model: str, context: Context, figures: Mapping[str, int]
) -> Mapping[str, object] | None:
    """What an entry point wants to find again, with what the answer was made from and what it cost."""
    if options.answer_details is None:
        return None
    made_from = {
        "summarized_message_count": context.tail_start - context.gap_messages,
        "summary_version": context.summary_version,
        "gap_messages": context.gap_messages,
        "context_tokens": context.counted_input_tokens,
    }
    return {**options.answer_details, "model": model, **made_from, **figures}


async def _to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Do it, and be cancelled afterwards if that was asked for meanwhile.

    A shielded scope keeps off only what anyio cancels; Ctrl-C and `asyncio.timeout` cancel the task itself.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            with anyio.CancelScope(shield=True):
                await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        task.exception()  # looked at, so that asyncio does not report it
        raise cancelled
    return task.result()


def _stats(context: Context, reply: ModelReply, turn: Turn, appended: Appended) -> TurnStats:
    return TurnStats(
        stored_messages=appended.message_count,
        summarized_messages=appended.summarized_message_count,
        newly_summarized_messages=appended.newly_summarized_messages,
        pending_messages=appended.pending_messages,
        gap_messages=context.gap_messages,
        context_messages=context.messages_sent,
        counted_input_tokens=context.counted_input_tokens,
        actual_input_tokens=reply.input_tokens,
        output_tokens=turn.output_tokens,
        summary_update_tokens=appended.summary_update_tokens,
        session_total_tokens=appended.usage.total_tokens,
        summary_version=appended.version,
    )
