"""`memora inspect`: all conversations in a table, or one in full.

Owns how many are read at the same time. A damaged conversation is shown as damaged and ends the command with 1; it
never hides the others.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import anyio
from rich.cells import cell_len

from memora.cli.exit import Exit
from memora.cli.render import local_time, padded, picture_lines, table_row
from memora.cli.runner import Signals, run_command
from memora.cli.streams import Style
from memora.cli.texts import Texts, texts_for
from memora.errors import (
    ConversationNotFound,
    InvalidId,
    MemoraError,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from memora.picture import Picture, next_context, take_picture
from memora.records import Record, encoded, next_context_record, picture_record, write_array
from memora.settings import Settings, load_settings
from memora.storage import open_storage
from memora.store import ConversationStore

_AT_ONCE: Final = 24
"""Below the size of the connection pool."""

_WIDEST_ID: Final = 40
_FIGURE_WIDTH: Final = 8


@dataclass(frozen=True, slots=True)
class Seen:
    """One conversation of the list: its picture, or what is wrong with it."""

    id: str
    picture: Picture | None = None
    damage: MemoraError | None = None


def run(*, conversation: str | None, as_json: bool) -> int:
    """Show what is stored. Returns the exit code."""
    command = partial(_show_all, as_json) if conversation is None else partial(_show_one, conversation, as_json)
    return run_command(command, as_json=as_json)


async def _show_one(conversation_id: str, as_json: bool, _: Signals) -> int:
    settings = load_settings()
    texts = texts_for(settings.lang)
    async with open_storage(settings) as storage:
        picture = await take_picture(storage.store, settings, conversation_id, whole_tail=True)
    following = next_context(picture, settings)
    if as_json:
        record = picture_record(picture)
        record["next_context"] = following and next_context_record(following, settings.max_input_tokens)
        sys.stdout.write(encoded(record) + "\n")
    else:
        lines = picture_lines(picture, following, settings.max_input_tokens, texts, Style.of(sys.stdout))
        sys.stdout.write(lines + "\n")
    return Exit.DONE


async def _show_all(as_json: bool, _: Signals) -> int:
    settings = load_settings()
    async with open_storage(settings) as storage:
        ids = await storage.store.conversation_ids()
        seen = _look_at(ids, storage.store, settings)
        return await (_write_json(seen) if as_json else _write_table(seen, ids, texts_for(settings.lang)))


async def _look_at(ids: Sequence[str], store: ConversationStore, settings: Settings) -> AsyncIterator[Seen]:
    """Look at conversations, some at the same time, and yield them in their order; those that are gone are left out."""
    for start in range(0, len(ids), _AT_ONCE):
        found: dict[str, Seen] = {}
        some = ids[start : start + _AT_ONCE]
        async with anyio.create_task_group() as looking:
            for conversation_id in some:
                looking.start_soon(_look, conversation_id, store, settings, found)
        for conversation_id in some:
            if conversation_id in found:
                yield found[conversation_id]


async def _look(conversation_id: str, store: ConversationStore, settings: Settings, found: dict[str, Seen]) -> None:
    try:
        found[conversation_id] = Seen(conversation_id, await take_picture(store, settings, conversation_id))
    except ConversationNotFound:
        pass
    except (StoreUnavailable, StoreRefused):
        raise
    except (StoreError, InvalidId) as damage:
        found[conversation_id] = Seen(conversation_id, damage=damage)


async def _write_json(conversations: AsyncIterator[Seen]) -> int:
    damaged: list[str] = []

    async def records() -> AsyncIterator[Record]:
        async for seen in conversations:
            if seen.picture:
                yield picture_record(seen.picture)
            elif seen.damage:
                damaged.append(seen.id)
                yield {"conversation": seen.id, "error": {"code": seen.damage.code, "message": str(seen.damage)}}

    await write_array(records(), sys.stdout)
    sys.stdout.write("\n")
    return Exit.FAILED if damaged else Exit.DONE


async def _write_table(conversations: AsyncIterator[Seen], ids: Sequence[str], texts: Texts) -> int:
    style, code = Style.of(sys.stdout), Exit.DONE
    figures = (texts.messages_column, texts.summarized_column, texts.pending_column, texts.version_column)
    head = (texts.id_column, *figures, texts.tokens_column, texts.active_column)
    id_width = min(_WIDEST_ID, max(map(cell_len, (texts.id_column, *ids))))
    widths = (id_width, *(max(_FIGURE_WIDTH, cell_len(name)) for name in head[1:-1]))
    if not ids:
        sys.stdout.write(texts.no_conversations + "\n")
        return code
    sys.stdout.write(style.dim(table_row(head, widths)) + "\n")
    async for seen in conversations:
        if seen.picture:
            sys.stdout.write(table_row(_cells(seen.picture), widths) + "\n")
        elif seen.damage:
            code = Exit.FAILED
            problem = style.data(f"{texts.damaged}: {seen.damage}")
            sys.stdout.write(f"{padded(style.data(seen.id), id_width)}  {style.error(problem)}\n")
    return code


def _cells(picture: Picture) -> tuple[str, ...]:
    conversation = picture.conversation
    return (
        conversation.id,
        f"{conversation.message_count:,}",
        f"{conversation.summary.summarized_message_count:,}",
        f"{picture.pending_messages:,}",
        f"{conversation.summary.version:,}",
        f"{conversation.usage.total_tokens:,}",
        local_time(picture.inspection.updated_at),
    )
