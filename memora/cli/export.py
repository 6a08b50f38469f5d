"""`memora export`: one conversation as JSON on standard output.

Owns its consistency. The first look says how far the export goes; history and audit trail only grow, so whatever comes
later is left out. A conversation that is deleted meanwhile is an error, and the output is left unfinished.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from functools import partial

from memora.cli.exit import Exit
from memora.cli.runner import Signals, run_command
from memora.core.conversation import Conversation
from memora.errors import ConversationDeleted, ConversationNotFound
from memora.picture import take_picture
from memora.records import Record, encoded, exported_fold, exported_message, picture_record, write_array
from memora.settings import load_settings
from memora.storage import open_storage
from memora.store import ConversationStore


def run(*, conversation: str) -> int:
    """Export. Returns the exit code."""
    return run_command(partial(_export, conversation))


async def _export(conversation_id: str, _: Signals) -> int:
    settings = load_settings()
    async with open_storage(settings) as storage:
        picture = await take_picture(storage.store, settings, conversation_id)
        head = encoded(picture_record(picture)).removesuffix("}")
        sys.stdout.write(f'{head}, "messages": ')
        await write_array(_messages(storage.store, picture.conversation), sys.stdout)
        sys.stdout.write(', "folds": ')
        await write_array(_folds(storage.store, picture.conversation), sys.stdout)
        await _check_still_the_same(storage.store, picture.conversation)
        sys.stdout.write("}\n")
    return Exit.DONE


async def _messages(store: ConversationStore, conversation: Conversation) -> AsyncIterator[Record]:
    position = 0
    async for message in store.messages(conversation.id):
        if position == conversation.message_count:
            return
        yield exported_message(position, message)
        position += 1


async def _folds(store: ConversationStore, conversation: Conversation) -> AsyncIterator[Record]:
    async for fold in store.folds(conversation.id):
        if fold.version > conversation.summary.version:
            return
        yield exported_fold(fold)


async def _check_still_the_same(store: ConversationStore, conversation: Conversation) -> None:
    """Another life of the same id would show by its generation."""
    try:
        now = (await store.inspect(conversation.id, 0)).conversation.generation
    except ConversationNotFound:
        now = ""
    if now != conversation.generation:
        raise ConversationDeleted(f"conversation {conversation.id} was deleted while it was being exported")
