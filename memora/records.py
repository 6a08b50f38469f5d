"""The shapes of machine output: what `--json` and `export` write.

Owns the field names of the contract. Must not compute anything.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, TextIO

from memora.chat import TurnResult
from memora.core.conversation import Message
from memora.core.window import Context, ContextTokens
from memora.picture import Picture
from memora.store import Fold, message_record

Record = dict[str, Any]


def encoded(record: object) -> str:
    """JSON on one line, readable for people who read Chinese."""
    return json.dumps(record, ensure_ascii=False)


def turn_record(result: TurnResult) -> Record:
    """A stored turn."""
    return {
        "type": "turn",
        "conversation": result.conversation_id,
        "text": result.text,
        "stats": asdict(result.stats),
        "context": tokens_record(result.context.tokens),
        "version": result.stats.summary_version,
        "incomplete": result.incomplete,
    }


def tokens_record(tokens: ContextTokens) -> Record:
    """The tokens of a context by part."""
    return {**asdict(tokens), "total": tokens.total}


def context_record(conversation_id: str, context: Context | None, max_input_tokens: int) -> Record:
    """What was sent for the last answer, word for word; no messages if nothing was."""
    record: Record = {"type": "context", "conversation": conversation_id, "max_input_tokens": max_input_tokens}
    if context is None:
        return {**record, "instructions": None, "messages": []}
    request = context.request
    return {
        **record,
        "instructions": request.instructions,
        "messages": [{"role": role, "content": content} for role, content in request.messages],
        "tokens": tokens_record(context.tokens),
        "counted_input_tokens": context.counted_input_tokens,
        "gap_messages": context.gap_messages,
        "summary_version": context.summary_version,
    }


def summary_record(conversation_id: str, picture: Picture | None) -> Record:
    """The summary and how far it reaches."""
    record: Record = {"type": "summary", "conversation": conversation_id}
    if picture is None:
        return {**record, "summary": "", "version": 0, "summarized_message_count": 0, "message_count": 0}
    conversation = picture.conversation
    return {
        **record,
        "summary": conversation.summary.text,
        "summary_tokens": conversation.summary.tokens,
        "version": conversation.summary.version,
        "summarized_message_count": conversation.summary.summarized_message_count,
        "message_count": conversation.message_count,
        "pending_messages": picture.pending_messages,
    }


def picture_record(picture: Picture) -> Record:
    """One conversation, as `inspect` shows it."""
    conversation, inspection = picture.conversation, picture.inspection
    return {
        "conversation": conversation.id,
        "message_count": conversation.message_count,
        "summarized_message_count": conversation.summary.summarized_message_count,
        "pending_messages": picture.pending_messages,
        "window_messages": picture.window_messages,
        "version": conversation.summary.version,
        "generation": conversation.generation,
        "summary": conversation.summary.text,
        "summary_tokens": conversation.summary.tokens,
        "usage": {**asdict(conversation.usage), "total_tokens": conversation.usage.total_tokens},
        "created_at": inspection.created_at,
        "updated_at": inspection.updated_at,
        "fold_due_at": inspection.fold_due_at,
        "fold_failures": inspection.fold_failures,
        "fold_conflicts": inspection.fold_conflicts,
        "last_fold_error": inspection.last_fold_error,
    }


def next_context_record(context: Context, max_input_tokens: int) -> Record:
    """What the next answer would be made from, without its message."""
    return {
        "messages": context.messages_sent - 1,
        "gap_messages": context.gap_messages,
        "tokens": tokens_record(context.tokens),
        "max_input_tokens": max_input_tokens,
        "room_for_message_tokens": max(0, max_input_tokens - context.counted_input_tokens),
    }


def exported_message(position: int, message: Message) -> Record:
    """One message of the history."""
    return {"position": position, **message_record(message)}


def exported_fold(fold: Fold) -> Record:
    """One entry of the audit trail, with the names it has in Redis."""
    record = asdict(fold)
    return {"version": record.pop("version"), "from": record.pop("start"), "to": record.pop("end"), **record}


async def write_array(records: AsyncIterator[Record], stream: TextIO) -> None:
    """Write a JSON array piece by piece, so that it may be longer than memory."""
    stream.write("[")
    separator = ""
    async for record in records:
        stream.write(separator + encoded(record))
        separator = ", "
    stream.write("]")
