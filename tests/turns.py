"""Short ways to make the records that tests store."""

from __future__ import annotations

from memora.core.conversation import Conversation, Message
from memora.core.tokens import count_text_tokens
from memora.core.window import Budget, select_context
from memora.store import Appended, ConversationStore, FoldResult, Turn

BUDGET = Budget(max_input_tokens=1_000, max_recent_turns=3, max_summary_tokens=300)
WINDOW_MESSAGES = 6
MOST_MESSAGES = 250


def message(role: str, content: str) -> Message:
    """A message with its tokens counted."""
    assert role in ("user", "assistant")
    return Message("user" if role == "user" else "assistant", content, count_text_tokens(content))


def turn(
    conversation: Conversation,
    number: int | str,
    *,
    window: int = WINDOW_MESSAGES,
    most_window: int = 0,
    turn_id: str = "",
) -> Turn:
    """Turn `number` of a conversation, with an id of its own."""
    question, answer = f"question {number}", f"answer {number}"
    return Turn(
        turn_id=turn_id or f"turn-{number}",
        answered_in=conversation.generation,
        user=message("user", question),
        assistant=message("assistant", answer),
        context=select_context(conversation, "", question, BUDGET),
        window_messages=window,
        input_tokens=10,
        output_tokens=5,
        most_window_messages=most_window,
    )


async def append_turns(store: ConversationStore, conversation_id: str, numbers: range) -> Appended:
    """Store several turns one after the other; what the last one returned."""
    appended = None
    for number in numbers:
        conversation = await store.load(conversation_id, MOST_MESSAGES)
        appended = await store.append(conversation_id, turn(conversation, number))
    assert appended is not None
    return appended


def fold_result(text: str = "a summary") -> FoldResult:
    """What a summariser might have come to."""
    return FoldResult(text, count_text_tokens(text), "some-model", 7, 3, 0.25)
