"""Read this first: Memora in one conversation, over a real Redis, a real arq worker and the real `openai` client.

A learner talks to the assistant in Traditional Chinese. The window holds three turns, so when the fourth is stored the
first one leaves it, and a worker folds it into the summary behind the chat.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from polling import eventually

from memora.bootstrap import Memora
from memora.chat import TurnResult
from memora.core.prompts import DEFAULT_INSTRUCTIONS, summary_message
from memora.fold_queue import QUEUE, job_id
from memora.offline_model import OfflineModel
from memora.store import Inspection

LEARNER = "learner"
FIRST_FOUR = (
    "我下個月要考 TOEIC。",
    "什麼是 present perfect？",
    "請給我三個 B1 單字。",
    "journey 和 travel 有什麼不同？",
)
QUESTION = "我下個月要考什麼？"


async def say(memora: Memora, text: str) -> TurnResult:
    """One turn, with what was streamed checked against what was stored."""
    pieces: list[str] = []

    async def emit(piece: str) -> None:
        pieces.append(piece)

    result = await memora.chat.reply(LEARNER, text, emit)
    assert "".join(pieces) == result.text
    return result


async def look(memora: Memora) -> Inspection:
    return await memora.store.inspect(LEARNER, 100)


@asynccontextmanager
async def worker_beside(memora: Memora) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        worker = memora.worker()
        tasks.start_soon(worker.run)
        yield
        worker.stop()


async def test_a_turn_that_leaves_the_window_is_folded_and_remembered(memora: Memora, offline: OfflineModel) -> None:
    """The worked example of the contract: five turns, one fold, and an answer that only the summary can give."""
    # Four turns, and nobody folds yet: every answer comes at once all the same.
    *_, fourth = [await say(memora, text) for text in FIRST_FOUR]
    assert fourth.stats.stored_messages == 8
    assert fourth.stats.pending_messages == 2
    assert fourth.stats.summarized_messages == 0

    # The first turn is pending: its job is in the queue, named by conversation, generation and count.
    before = await look(memora)
    queued = await memora.storage.redis.zrange(QUEUE, 0, -1)
    assert queued == [job_id(LEARNER, before.conversation.generation, 0).encode()]
    # Until the commit, the next context still carries it word for word.
    preview = await memora.chat.preview(before.conversation, QUESTION)
    assert preview.tail[0].content == FIRST_FOUR[0]
    assert preview.gap_messages == 0

    async with worker_beside(memora):

        async def folded() -> bool:
            return (await look(memora)).conversation.summary.summarized_message_count == 2

        await eventually(folded)

        after = (await look(memora)).conversation
        assert after.summary.version == 1
        assert "TOEIC" in after.summary.text
        assert "下個月" in after.summary.text

        # Turn 5 is answered from: summary of turn 1 + turns 2-4 + the question. The first turn itself is not sent.
        fifth = await say(memora, QUESTION)
        assert "TOEIC" in fifth.text
        sent = offline.requests()[-1]["body"]
        assert sent["instructions"] == DEFAULT_INSTRUCTIONS
        contents = [(item["role"], item["content"]) for item in sent["input"]]
        assert contents[0] == ("developer", summary_message(after.summary.text))
        assert [text for role, text in contents if role == "user"] == [*FIRST_FOUR[1:], QUESTION]
        assert FIRST_FOUR[0] not in [text for _, text in contents]
        assert sent["store"] is False

        # The figures of the turn say the same.
        assert fifth.stats.stored_messages == 10
        assert fifth.stats.summarized_messages == 2
        assert fifth.stats.newly_summarized_messages == 2
        assert fifth.stats.gap_messages == 0
        assert fifth.stats.counted_input_tokens == fifth.stats.actual_input_tokens
        assert fifth.stats.counted_input_tokens <= 1_000
        assert fifth.stats.summary_update_tokens > 0

    # `history` lists all ten messages, and `context` is exactly what was sent.
    history = [message.content async for message in memora.store.messages(LEARNER)]
    assert len(history) == 10
    assert history[::2] == [*FIRST_FOUR, QUESTION]
    context = await memora.store.last_context(LEARNER)
    assert context is not None
    assert list(context.request.messages) == contents
    assert context.request.instructions == DEFAULT_INSTRUCTIONS


async def test_without_the_summary_the_fact_is_nowhere(memora: Memora, offline: OfflineModel) -> None:
    """The offline model answers from its context and from nothing else, so remembering is Memora's doing."""
    for text in FIRST_FOUR[1:]:
        await say(memora, text)
    answer = await say(memora, QUESTION)
    assert "TOEIC" not in answer.text
    assert "TOEIC" not in str(offline.requests()[-1]["body"])


async def test_redis_cli_tells_the_whole_state_of_the_summary(memora: Memora) -> None:
    """A person who looks at the summary's hash sees text, counts, version and cost, in words."""
    async with worker_beside(memora):
        for text in FIRST_FOUR:
            await say(memora, text)

        async def folded() -> bool:
            return (await look(memora)).conversation.summary.version == 1

        await eventually(folded)
    key = f"memora:{{0}}:{LEARNER}:summary"
    flat = await memora.storage.redis.hgetall(key)  # type: ignore[misc]  # annotated as sync and async at once
    fields = {name.decode(): value.decode() for name, value in flat.items()}
    assert fields["summarized_message_count"] == "2"
    assert fields["message_count"] == "8"
    assert fields["version"] == "1"
    assert "TOEIC" in fields["summary"]
    expected = {"generation", "summary_tokens", "created_at", "updated_at", "answer_input_tokens", "fold_input_tokens"}
    assert expected <= set(fields)
