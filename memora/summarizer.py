"""The summariser: carries out a fold's plan, one model call a step, and lets nothing but a summary through.

Owns the calls, their deadlines and what they cost. Must not read or write the store: no lock is held while a model
thinks. A failure that can pass is a value, because its tokens are counted too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic

from memora.core.folding import FoldLimits, FoldPlan, FoldStep, FoldWork
from memora.core.prompts import ModelRequest, control_request, fold_request, shorten_request, unfolded_note
from memora.core.quality_gate import Accepted, Rejected, TooLong, is_empty_reply, judge_shortened, judge_summary
from memora.core.text import han_share
from memora.core.tokens import count_text_tokens, request_tokens
from memora.errors import (
    ContextLengthExceeded,
    ModelError,
    ModelRefused,
    ModelUnavailable,
    OutputUnusable,
)
from memora.llm import ModelClient, ModelReply

_CHINESE_TALK = 0.3
"""From this share of Chinese characters on, a note about a message is written in Chinese."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens that went into and came out of the summarising model."""

    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens)


@dataclass(frozen=True, slots=True)
class Summarized:
    """A summary that passed the gate. `unfolded` are positions that a note stands for, `notes` what was special."""

    text: str
    tokens: int
    spent: Spent
    duration_seconds: float
    notes: tuple[str, ...] = ()
    unfolded: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NotSummarized:
    """No summary this time. `rejected`: the model answered, but not with a summary."""

    reason: str
    spent: Spent
    rejected: bool
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class _Draft:
    """The summary as it is after some of the steps."""

    text: str
    spent: Spent = Spent()
    notes: tuple[str, ...] = ()
    unfolded: tuple[int, ...] = ()


class Summarizer:
    """Summarises with one model, inside the limits of the settings."""

    def __init__(self, client: ModelClient, *, model: str, limits: FoldLimits, timeout_seconds: float) -> None:
        self._client = client
        self._limits = limits
        self._timeout_seconds = timeout_seconds
        self.model = model

    async def summarize(self, work: FoldWork, plan: FoldPlan) -> Summarized | NotSummarized:
        """Carry out all steps of the plan, each starting from the result of the one before."""
        started = monotonic()
        draft = _Draft(work.summary.text)
        for step in plan.steps:
            result = await self._step(draft, step, strict=work.rejections == 0, last_try=plan.last_try)
            if isinstance(result, NotSummarized):
                return result
            draft = result
        return Summarized(
            text=draft.text,
            tokens=count_text_tokens(draft.text, self._limits.cap.vocabulary),
            spent=draft.spent,
            duration_seconds=monotonic() - started,
            notes=draft.notes,
            unfolded=draft.unfolded,
        )

    async def _step(self, draft: _Draft, step: FoldStep, *, strict: bool, last_try: bool) -> _Draft | NotSummarized:
        result = await self._show(draft, step, strict=strict)
        if isinstance(result, NotSummarized) and last_try:
            return await self._show_once_more(draft, step, result)
        return result

    async def _show(self, draft: _Draft, step: FoldStep, *, strict: bool) -> _Draft | NotSummarized:
        """Show the messages of one step to the model and judge what it makes of them."""
        cap = self._limits.cap
        request = fold_request(draft.text, step.pieces, max_words=cap.max_words, max_tokens=cap.max_tokens)
        try:
            reply, spent = await self._call(request)
        except (ModelError, ContextLengthExceeded) as error:
            return _failure(error, draft.spent)
        draft = replace(draft, spent=draft.spent + spent)
        verdict = (
            Rejected(reply.problem)
            if reply.problem
            else judge_summary(reply.text, draft.text, step.pieces, cap, strict=strict)
        )
        match verdict:
            case Accepted(text):
                return replace(draft, text=text)
            case TooLong(text):
                return await self._shorten(draft, text)
            case Rejected(reason):
                reason = f"the reply is no summary ({reason})"
                return NotSummarized(reason, draft.spent, rejected=True)

    async def _shorten(self, draft: _Draft, text: str) -> _Draft:
        """Ask once for a shorter version; a cut at a sentence does it otherwise."""
        cap = self._limits.cap
        reply = ModelReply("", problem="not asked")
        try:
            reply, spent = await self._call(shorten_request(text, max_words=cap.max_words, max_tokens=cap.max_tokens))
            draft = replace(draft, spent=draft.spent + spent)
        except (ModelError, ContextLengthExceeded):
            pass
        short = judge_shortened("" if reply.problem else reply.text, text, cap)
        return replace(draft, text=short, notes=(*draft.notes, "shortened"))

    async def _show_once_more(self, draft: _Draft, step: FoldStep, failure: NotSummarized) -> _Draft | NotSummarized:
        """The last try. If the model works but not on these messages, a note takes their place.

        So one poisonous message never stops a conversation, and an outage never turns good messages into notes.
        """
        draft = replace(draft, spent=failure.spent)
        works, spent = await self._model_works()
        draft = replace(draft, spent=draft.spent + spent)
        if not works:
            return replace(failure, spent=draft.spent)
        again = await self._show(draft, step, strict=False)
        if not isinstance(again, NotSummarized):
            return again
        if set(step.positions) <= set(draft.unfolded):
            # A further piece of a message that a note stands for already.
            return replace(draft, spent=again.spent)
        chinese = han_share(" ".join(piece.content[:1_000] for piece in step.pieces)) >= _CHINESE_TALK
        note = unfolded_note(step.positions, chinese=chinese)
        return replace(
            draft,
            text=_with_note(draft.text, note, self._limits),
            spent=again.spent,
            notes=(*draft.notes, again.reason),
            unfolded=(*draft.unfolded, *step.positions),
        )

    async def _model_works(self) -> tuple[bool, Spent]:
        """Whether the model manages a harmless fold right now."""
        cap = self._limits.cap
        try:
            reply, spent = await self._call(control_request(max_words=cap.max_words, max_tokens=cap.max_tokens))
        except (ModelError, ContextLengthExceeded):
            return False, Spent()
        return not reply.problem and not is_empty_reply(reply.text), spent

    async def _call(self, request: ModelRequest) -> tuple[ModelReply, Spent]:
        reply = await self._client.complete(request, model=self.model, timeout_seconds=self._timeout_seconds)
        vocabulary = self._limits.cap.vocabulary
        spent_in = reply.input_tokens
        spent_out = reply.output_tokens
        if spent_in is None:
            spent_in = request_tokens(request.instructions, request.messages, vocabulary)
        if spent_out is None:
            spent_out = count_text_tokens(reply.text, vocabulary)
        return reply, Spent(spent_in, spent_out)


def _failure(error: ModelError | ContextLengthExceeded, spent: Spent) -> NotSummarized:
    return NotSummarized(
        reason=str(error),
        spent=spent,
        rejected=isinstance(error, (ModelRefused, OutputUnusable, ContextLengthExceeded)),
        retry_after_seconds=error.retry_after if isinstance(error, ModelUnavailable) else None,
    )


def _with_note(summary: str, note: str, limits: FoldLimits) -> str:
    """The summary followed by the note; the summary gives way if both together are over the cap."""
    cap = limits.cap
    if not summary:
        return cap.cut(note)
    room = replace(
        cap,
        max_words=max(cap.max_words - 12, 1),
        max_tokens=max(cap.max_tokens - count_text_tokens(note, cap.vocabulary) - 2, 1),
    )
    return cap.cut(f"{room.cut(summary)} {note}")
