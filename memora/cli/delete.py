"""`memora delete`: forgets one conversation, and what was typed in it."""

from __future__ import annotations

import sys
from functools import partial

from memora.cli.exit import Exit
from memora.cli.keyboard import forget_typed
from memora.cli.lines import LineReader
from memora.cli.runner import Signals, run_command
from memora.cli.streams import is_terminal
from memora.cli.texts import Texts, texts_for
from memora.core.conversation import check_id
from memora.errors import ConversationDamaged
from memora.settings import load_settings
from memora.storage import data_directory, open_storage
from memora.store import ConversationStore

_LONGEST_REPLY = 16


def run(*, conversation: str, yes: bool) -> int:
    """Delete. Returns the exit code."""
    return run_command(partial(_delete, conversation, yes))


async def _delete(conversation_id: str, yes: bool, _: Signals) -> int:
    check_id(conversation_id)
    settings = load_settings()
    texts = texts_for(settings.lang)
    async with open_storage(settings) as storage:
        asks = not yes and is_terminal(sys.stdin) and is_terminal(sys.stderr)
        if asks and not await _is_sure(conversation_id, storage.store, texts):
            sys.stderr.write(f"memora: {texts.not_deleted}\n")
            return Exit.FAILED
        if not await storage.store.delete(conversation_id):
            await storage.store.inspect(conversation_id, 0)  # says that there is none, and how to see what there is
        forget_typed(data_directory(settings), conversation_id)
    sys.stdout.write(texts.deleted.format(id=conversation_id) + "\n")
    return Exit.DONE


async def _is_sure(conversation_id: str, store: ConversationStore, texts: Texts) -> bool:
    try:
        count = f"{(await store.inspect(conversation_id, 0)).conversation.message_count:,}"
    except ConversationDamaged:
        count = "?"
    sys.stderr.write(texts.really_delete.format(id=conversation_id, messages=count))
    sys.stderr.flush()
    async for line in LineReader(sys.stdin.fileno(), max_chars=_LONGEST_REPLY).lines():
        return line.text.strip().lower() in ("y", "yes", "是")
    return False
