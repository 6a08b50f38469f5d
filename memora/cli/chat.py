"""`memora chat`: opens everything, chooses the face, and leaves no summary behind that could still be made.

Owns the course of a chat from its first line to its last.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

import anyio

from memora.bootstrap import Memora, open_memora
from memora.cli.exit import Exit
from memora.cli.lines import LineChat
from memora.cli.logs import log_to_stderr
from memora.cli.output import JsonOutput, Output, TextOutput
from memora.cli.runner import Signals, run_command
from memora.cli.session import CATCH_UP_SECONDS, Session, new_conversation_id
from memora.cli.streams import is_dumb, is_terminal
from memora.cli.terminal import TerminalChat, TerminalOutput, quiet_keys
from memora.cli.texts import Texts, texts_for
from memora.core.conversation import check_id
from memora.errors import StoreError
from memora.picture import Picture
from memora.settings import load_settings
from memora.storage import data_directory

_PROMPT: Final = "> "


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line asked for."""

    conversation: str | None
    message: str | None
    as_json: bool
    offline: bool

    @property
    def is_by_lines(self) -> bool:
        """Whether there is no terminal to talk at, or one that can do nothing."""
        has_terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout) and not is_dumb()
        return self.message is not None or self.as_json or not has_terminal


def run(*, conversation: str | None, message: str | None, as_json: bool, offline: bool) -> int:
    """Chat. Returns the exit code."""
    wishes = Wishes(conversation, message, as_json, offline)
    return run_command(partial(_chat, wishes), as_json=as_json, errors_to_stdout=as_json)


async def _chat(wishes: Wishes, signals: Signals) -> int:
    settings = load_settings(**({"offline": True} if wishes.offline else {}))
    conversation_id = wishes.conversation
    if conversation_id is None:
        conversation_id = new_conversation_id(datetime.now(UTC).astimezone().date())
    check_id(conversation_id)
    # A fold that has to wait is told as a notice; the log is for those who asked for it.
    log_to_stderr(settings.log_level if "log_level" in settings.model_fields_set else "ERROR")
    with _terminal_state(wishes):
        async with open_memora(settings) as memora:
            return await _Chat(wishes, signals, memora, Session(memora, conversation_id)).course()


def _terminal_state(wishes: Wishes) -> AbstractContextManager[None]:
    return nullcontext() if wishes.is_by_lines else quiet_keys()


class _Chat:
    """One run of the command."""

    def __init__(self, wishes: Wishes, signals: Signals, memora: Memora, session: Session) -> None:
        self._wishes = wishes
        self._signals = signals
        self._memora = memora
        self._session = session
        self._texts: Texts = texts_for(memora.settings.lang)

    async def course(self) -> int:
        """From the first line to the last. Returns the exit code."""
        async with anyio.create_task_group() as beside:
            if self._wishes.is_by_lines:
                output: Output = self._line_output()
            else:
                output = TerminalOutput(self._texts)
            self._session.on_notice = output.noticed
            await self._introduce(output, await self._session.open())
            if self._session.has_worker:
                beside.start_soon(self._memora.worker(on_fold=self._session.on_fold).run)
            else:
                beside.start_soon(self._look_after_redis, output)
            beside.start_soon(self._session.watch)
            beside.start_soon(self._session.warm_up)
            code = await self._converse(output)
            if self._session.has_worker:
                await self._catch_up(output)
            beside.cancel_scope.cancel()
        if isinstance(output, TerminalOutput) and self._session.has_messages:
            output.hint(self._texts.leaving.format(id=self._session.conversation_id))
        return code

    def _line_output(self) -> Output:
        if self._wishes.as_json:
            return JsonOutput(sys.stdout, sys.stderr, self._texts)
        return TextOutput(sys.stdout, sys.stderr, self._texts)

    async def _introduce(self, output: Output, picture: Picture | None) -> None:
        """Say what a person should know beforehand: where they are, how to come back, who answers."""
        texts, conversation_id = self._texts, self._session.conversation_id
        if isinstance(output, TerminalOutput):
            output.hint(self._title(picture))
            output.hint(texts.how_to_leave)
        elif self._wishes.conversation is None:
            await output.tell(f"{self._title(picture)} · {texts.come_back.format(id=conversation_id)}")
        if self._memora.settings.uses_offline_model:
            await output.tell(texts.offline_chosen if self._memora.settings.offline else texts.offline_model)

    def _title(self, picture: Picture | None) -> str:
        texts, conversation_id = self._texts, self._session.conversation_id
        if picture is None:
            return texts.new_conversation.format(id=conversation_id)
        conversation = picture.conversation
        return texts.known_conversation.format(
            id=conversation_id,
            messages=f"{conversation.message_count:,}",
            summarized=f"{conversation.summary.summarized_message_count:,}",
        )

    async def _look_after_redis(self, output: Output) -> None:
        """Warn about a configured Redis that will not do, without holding up the first turn."""
        try:
            health = await self._memora.storage.health(time.time())
        except StoreError:
            return
        if health.evicts:
            await output.tell(self._texts.evicts)
        if not health.workers:
            await output.tell(self._texts.no_worker)

    async def _converse(self, output: Output) -> int:
        settings = self._memora.settings
        if isinstance(output, TerminalOutput):
            chat = TerminalChat(self._session, output, self._texts, data_directory(settings))
            self._signals.handler = chat.take_signal
            await chat.converse()
            return Exit.DONE
        lines = LineChat(
            self._session,
            output,
            max_chars=settings.max_message_chars,
            on_ready=_prompt if is_terminal(sys.stdin) and is_terminal(sys.stderr) else None,
        )
        message = self._wishes.message
        await (lines.converse() if message is None else lines.say(message))
        return lines.worst

    async def _catch_up(self, output: Output) -> None:
        """Let the worker beside this chat finish its work; Ctrl-C skips that."""
        with anyio.move_on_after(CATCH_UP_SECONDS) as waiting:
            self._signals.handler = partial(_skip, waiting)
            await self._session.catch_up(lambda pending: output.tell(self._texts.catching_up.format(pending=pending)))
        if self._session.pending_messages:
            await output.tell(self._texts.not_caught_up.format(pending=self._session.pending_messages))


def _prompt() -> None:
    sys.stderr.write(_PROMPT)
    sys.stderr.flush()


def _skip(waiting: anyio.CancelScope, number: signal.Signals) -> bool:
    if number is signal.SIGINT:
        waiting.cancel()
    return number is signal.SIGINT
