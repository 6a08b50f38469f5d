"""One fold: load, plan, summarise, commit if the count is still the same.

Owns the order of these steps. The summariser is the only slow one, and nothing is held while it runs. Must not know
that arq exists: whoever calls decides when to try again.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import Final

from memora.core.conversation import MESSAGES_PER_TURN
from memora.core.folding import FoldPlan, backoff_seconds, plan_fold
from memora.core.window import Window, select_window
from memora.settings import Settings
from memora.store import CommitStatus, ConversationStore, FoldResult, FoldSnapshot
from memora.summarizer import NotSummarized, Summarizer

MOST_MESSAGES: Final = 200
"""Messages read for one fold; what they are cut down to is decided by tokens."""

LONGEST_RETRY_AFTER_SECONDS: Final = 300.0
"""A provider may ask us to wait, but not for ever."""


@dataclass(frozen=True, slots=True)
class Folded:
    """Messages `[start, end)` are in the summary now; `pending_messages` still wait."""

    start: int
    end: int
    version: int
    pending_messages: int


@dataclass(frozen=True, slots=True)
class Postponed:
    """The summariser failed; the summary and the count are as they were."""

    reason: str
    retry_in_seconds: float


@dataclass(frozen=True, slots=True)
class Discarded:
    """A summary was made, or tried, for nothing: another fold was first, or what it was made from is no more."""

    start: int
    end: int


class NothingToFold:
    """There was nothing to do: no conversation, nothing pending, or the job was for an earlier count."""


FoldOutcome = Folded | Postponed | Discarded | NothingToFold


class FoldService:
    """Folds conversations, one call a fold."""

    def __init__(self, settings: Settings, store: ConversationStore, summarizer: Summarizer) -> None:
        self._settings = settings
        self._store = store
        self._summarizer = summarizer

    async def fold(self, conversation_id: str, *, expected: tuple[str, int] | None = None) -> FoldOutcome:
        """Fold the oldest pending messages of a conversation.

        `expected` is the generation and count a job was made for; if they have moved on, so has the work.

        Raises:
            StoreError.
        """
        snapshot = await self._store.load_fold(
            conversation_id,
            most_messages=MOST_MESSAGES,
            window=self._settings.budget.most_recent_turns * MESSAGES_PER_TURN,
        )
        if snapshot is None or (expected and expected != _position(snapshot)):
            return NothingToFold()
        window = self._window(snapshot, snapshot.summary.text)
        # As the last turn had it, or smaller if the summary has grown since.
        work = snapshot.work(min(window.holding(snapshot.unsummarized_messages), snapshot.window_messages))
        plan = plan_fold(work, self._settings.fold_limits)
        if plan is None:
            await self._store.settle_fold(conversation_id, snapshot)
            return NothingToFold()
        summarized = await self._summarizer.summarize(work, plan)
        fold_id = secrets.token_hex(8)
        if isinstance(summarized, NotSummarized):
            return await self._postpone(snapshot, plan, summarized, fold_id)
        result = FoldResult(
            text=summarized.text,
            tokens=summarized.tokens,
            model=self._summarizer.model,
            input_tokens=summarized.spent.input_tokens,
            output_tokens=summarized.spent.output_tokens,
            duration_seconds=summarized.duration_seconds,
            notes=summarized.notes,
            unfolded=summarized.unfolded,
        )
        window = self._window(snapshot, summarized.text)
        committed = await self._store.commit_fold(
            snapshot,
            plan.end,
            result,
            fold_id=fold_id,
            window_messages=window.messages,
            most_window_messages=window.most_messages,
        )
        if committed.status is not CommitStatus.COMMITTED:
            return Discarded(plan.start, plan.end)
        return Folded(plan.start, plan.end, committed.version, committed.pending_messages)

    def _window(self, snapshot: FoldSnapshot, summary: str) -> Window:
        """The window beside this summary; the commit keeps to a smaller one that the last turn found."""
        return select_window(snapshot.newest, summary, self._settings.instructions_text, self._settings.budget)

    async def _postpone(
        self, snapshot: FoldSnapshot, plan: FoldPlan, failed: NotSummarized, fold_id: str
    ) -> FoldOutcome:
        first = self._settings.fold_retry_seconds
        # Jitter only spreads load, so the plain generator will do.
        delay = backoff_seconds(snapshot.failures + 1, first, random.random())  # noqa: S311
        delay = max(delay, min(failed.retry_after_seconds or 0.0, LONGEST_RETRY_AFTER_SECONDS))
        try_again = await self._store.fail_fold(
            snapshot,
            fold_id=fold_id,
            reason=failed.reason,
            rejected=failed.rejected,
            input_tokens=failed.spent.input_tokens,
            output_tokens=failed.spent.output_tokens,
            delay_seconds=delay,
        )
        return Postponed(failed.reason, delay) if try_again else Discarded(plan.start, plan.end)


def _position(snapshot: FoldSnapshot) -> tuple[str, int]:
    return snapshot.generation, snapshot.summary.summarized_message_count
