"""One conversation as it is right now: what is summarized, pending and in the window, and what would be sent next.

Owns the figures that `inspect`, `history` and the fold notices share. Reads once, writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memora.core.conversation import MESSAGES_PER_TURN, Conversation, pending_messages
from memora.core.window import Context, most_useful_messages, select_context, select_window
from memora.errors import ContextLengthExceeded
from memora.settings import Settings
from memora.store import ConversationStore, Inspection

MessageState = Literal["folded", "pending", "window"]


@dataclass(frozen=True, slots=True)
class Picture:
    """A conversation and where its messages are."""

    inspection: Inspection
    window_messages: int

    @property
    def conversation(self) -> Conversation:
        """The conversation, with the newest part of its tail."""
        return self.inspection.conversation

    @property
    def pending_messages(self) -> int:
        """Messages that wait for a fold."""
        conversation = self.conversation
        folded = conversation.summary.summarized_message_count
        return pending_messages(conversation.message_count, folded, self.window_messages)

    def state_of(self, position: int) -> MessageState:
        """Where the message at this position is; one that came after the picture is in the window."""
        folded = self.conversation.summary.summarized_message_count
        if position < folded:
            return "folded"
        return "pending" if position < folded + self.pending_messages else "window"


async def take_picture(
    store: ConversationStore,
    settings: Settings,
    conversation_id: str,
    *,
    whole_tail: bool = False,
    most_newest: int = 0,
) -> Picture:
    """Look at a conversation; with `whole_tail` as far back as a context could reach, else only into the window.

    `most_newest` messages of the history, summarized or not, are looked at too.

    Raises:
        ConversationNotFound, InvalidId, StoreError.
    """
    budget = settings.budget
    most = most_useful_messages(budget) if whole_tail else budget.most_recent_turns * MESSAGES_PER_TURN
    inspection = await store.inspect(conversation_id, most, most_newest)
    conversation = inspection.conversation
    window = select_window(conversation.tail, conversation.summary.text, settings.instructions_text, budget)
    # The window is what the last turn found it to be, or smaller if the summary has grown since: as a fold sees it.
    return Picture(inspection, min(window.holding(conversation.unsummarized_messages), inspection.window_messages))


def next_context(picture: Picture, settings: Settings) -> Context | None:
    """The context of the next answer, as far as it is known without the message; None if not even that fits."""
    try:
        return select_context(picture.conversation, settings.instructions_text, "", settings.budget)
    except ContextLengthExceeded:
        return None
