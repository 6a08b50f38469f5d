"""`memora rebuild` and `memora rollback`: the summary anew from the history, or back at an earlier version.

Owns what a person sees while it is folded again. If no worker lives the command folds by itself; commits are checked,
so that a worker beside it does no harm.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Final

import anyio

from memora.bootstrap import Memora, open_memora
from memora.cli.exit import Exit
from memora.cli.progress import Progress
from memora.cli.runner import Signals, run_command
from memora.cli.texts import Texts, texts_for
from memora.core.conversation import check_id
from memora.errors import CallerError
from memora.fold import Postponed
from memora.picture import Picture, take_picture
from memora.records import encoded, picture_record
from memora.settings import load_settings
from memora.store import NoSuchVersion

_LOOK_SECONDS: Final = 0.2
_PATIENCE_SECONDS: Final = 60.0
"""How long a worker may come no further before it is left alone with its work."""


class NoSuchSummaryVersion(CallerError):
    """The summary never had this version."""

    code = "no_such_version"


def run_rebuild(*, conversation: str, as_json: bool, offline: bool) -> int:
    """Make the summary anew. Returns the exit code."""
    return run_command(partial(_rebuild, conversation, as_json, offline), as_json=as_json)


def run_rollback(*, conversation: str, version: int, as_json: bool) -> int:
    """Take the summary back. Returns the exit code."""
    return run_command(partial(_rollback, conversation, version, as_json), as_json=as_json)


async def _rebuild(conversation_id: str, as_json: bool, offline: bool, _: Signals) -> int:
    check_id(conversation_id)
    settings = load_settings(**({"offline": True} if offline else {}))
    texts = texts_for(settings.lang)
    async with open_memora(settings) as memora:
        await _rewind(memora, conversation_id, 0)
        progress = Progress(sys.stderr)
        is_done = await _fold_all(memora, conversation_id, texts, progress)
        progress.clear()
        picture = await take_picture(memora.store, settings, conversation_id)
    return _show(picture, texts.rebuilt if is_done else texts.rebuild_goes_on, as_json=as_json)


async def _rollback(conversation_id: str, version: int, as_json: bool, _: Signals) -> int:
    check_id(conversation_id)
    settings = load_settings()
    async with open_memora(settings) as memora:
        await _rewind(memora, conversation_id, version)
        picture = await take_picture(memora.store, settings, conversation_id)
    return _show(picture, texts_for(settings.lang).rolled_back, as_json=as_json, version=version)


async def _rewind(memora: Memora, conversation_id: str, version: int) -> None:
    owner = (await memora.store.inspect(conversation_id, 0)).owner
    rewound = await memora.store.rewind(conversation_id, version, owner=owner)
    if isinstance(rewound, NoSuchVersion):
        newest = rewound.newest
        what = f"choose 0 to {newest} with --to" if newest else "nothing was summarized so far"
        raise NoSuchSummaryVersion(f"the summary of {conversation_id} has no version {version}: {what}")


async def _fold_all(memora: Memora, conversation_id: str, texts: Texts, progress: Progress) -> bool:
    """Wait for the worker, or fold without one, until nothing is pending. False if that will take longer."""
    has_worker = await memora.storage.workers() > 0
    picture = await take_picture(memora.store, memora.settings, conversation_id)
    until = anyio.current_time() + _PATIENCE_SECONDS
    while picture.pending_messages:
        if progress.is_due:
            folded = picture.conversation.summary.summarized_message_count
            total = folded + picture.pending_messages
            progress.say(texts.rebuilding.format(folded=f"{folded:,}", total=f"{total:,}"))
        if has_worker:
            await anyio.sleep(_LOOK_SECONDS)
        elif isinstance(postponed := await memora.folds.fold(conversation_id), Postponed):
            progress.clear()
            sys.stderr.write(f"memora: {texts.fold_failed.format(reason=postponed.reason)}\n")
            return False
        before, picture = picture, await take_picture(memora.store, memora.settings, conversation_id)
        if picture.conversation.summary.version != before.conversation.summary.version:
            until = anyio.current_time() + _PATIENCE_SECONDS
        elif anyio.current_time() > until:
            return False
    return True


def _show(picture: Picture, text: str, *, as_json: bool, version: int = 0) -> int:
    summary = picture.conversation.summary
    if as_json:
        sys.stdout.write(encoded(picture_record(picture)) + "\n")
    else:
        figures = {
            "id": picture.conversation.id,
            "version": version or summary.version,
            "folded": f"{summary.summarized_message_count:,}",
            "pending": f"{picture.pending_messages:,}",
        }
        sys.stdout.write(text.format(**figures) + "\n")
    return Exit.DONE
