"""Where a chat's answers, figures and notices go: text for people, or one JSON object a line for programs.

Owns the two ways to show a chat. Must not decide what is said or read what is typed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, TextIO

from memora.chat import TurnResult
from memora.cli.exit import error_line, error_record
from memora.cli.render import context_lines, history_entry, notice_line, stats_block, summary_lines
from memora.cli.session import FoldNotice, Session
from memora.cli.streams import Style, columns
from memora.cli.texts import Texts
from memora.cli.words import UnknownWord, Word
from memora.errors import MemoraError
from memora.records import (
    Record,
    context_record,
    encoded,
    exported_message,
    summary_record,
    turn_record,
    write_array,
)


class Output(Protocol):
    """How a chat is shown."""

    async def piece(self, text: str) -> None:
        """A piece of the answer, as it arrives."""

    def answered(self, result: TurnResult) -> None:
        """The turn is stored."""

    def failed(self, error: MemoraError) -> None:
        """There is no answer, and nothing was stored."""

    def unknown(self, word: UnknownWord) -> None:
        """A `/word` that is none of ours was not sent."""

    async def tell(self, text: str) -> None:
        """Something a person should know, whatever is going on at the moment."""

    async def noticed(self, notice: FoldNotice) -> None:
        """The summary has moved."""

    async def history(self, session: Session) -> None:
        """Every message."""

    async def context(self, session: Session) -> None:
        """What was sent for the last answer."""

    async def summary(self, session: Session) -> None:
        """What stands for the older messages."""

    def help(self) -> None:
        """What can be typed."""


class TextOutput:
    """For people: answers and what was asked for on one stream, figures and notices on another."""

    def __init__(self, answers: TextIO, notes: TextIO, texts: Texts) -> None:
        self._answers = answers
        self._notes = notes
        self._texts = texts
        self._answer_style = Style.of(answers)
        self._note_style = Style.of(notes)
        self._has_begun = False
        self._is_listing = False
        self._waiting: list[str] = []

    async def piece(self, text: str) -> None:
        """Write it at once."""
        self._has_begun = True
        self._answers.write(self._answer_style.data(text))
        self._answers.flush()

    def answered(self, result: TurnResult) -> None:
        """End the answer's line; figures follow."""
        self.end_line()
        if result.incomplete:
            self._note(self._note_style.warning(self._texts.cut_off.format(reason=result.incomplete)))
        self._note(stats_block(result.stats, self._texts, self._note_style, columns()))
        self._tell_waiting()

    def failed(self, error: MemoraError) -> None:
        """End whatever had begun; the error follows."""
        self.end_line()
        self._note(self._note_style.error(error_line(error)))
        self._tell_waiting()

    def unknown(self, word: UnknownWord) -> None:
        """A hint."""
        shown = self._note_style.data(word.word)
        hint = self._texts.did_you_mean if word.guess else self._texts.unknown_word
        self._note(self._note_style.warning(f"memora: {hint.format(word=shown, guess=word.guess)}"))

    async def tell(self, text: str) -> None:
        """A line, after the answer that is being written."""
        await self._tell(self._note_style.warning(f"memora: {text}"))

    async def noticed(self, notice: FoldNotice) -> None:
        """A line, after the answer that is being written."""
        await self._tell(notice_line(notice, self._texts, self._note_style))

    async def history(self, session: Session) -> None:
        """Message by message, so that it may be longer than memory."""
        picture = await session.picture()
        if picture is None:
            self._show(self._texts.no_history)
            return
        count = f"{picture.conversation.message_count:,}"
        self._show(self._texts.history_title.format(id=session.conversation_id, messages=count))
        self._is_listing = True
        try:
            async for entry in session.history(picture):
                self._show(history_entry(entry, self._texts, self._answer_style))
        finally:
            self._is_listing = False
            self._tell_waiting()

    async def context(self, session: Session) -> None:
        """Word for word."""
        context = await session.context()
        if context is None:
            self._show(self._texts.no_context)
            return
        self._show(context_lines(context, session.max_input_tokens, self._texts, self._answer_style))

    async def summary(self, session: Session) -> None:
        """Text and counts."""
        self._show(summary_lines(await session.picture(), self._texts, self._answer_style))

    def help(self) -> None:
        """All of it."""
        self._show(self._texts.words_help)

    def end_line(self) -> None:
        """End the line of an answer that has begun."""
        if self._has_begun:
            self._has_begun = False
            self._answers.write("\n")
            self._answers.flush()

    @property
    def _is_answering(self) -> bool:
        return self._has_begun or self._is_listing

    async def _tell(self, line: str) -> None:
        self._waiting.append(line)
        if not self._is_answering:
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        while self._waiting:
            self._note(self._waiting.pop(0))

    def _show(self, text: str) -> None:
        self._answers.write(text + "\n")
        self._answers.flush()

    def _note(self, text: str) -> None:
        self._notes.write(text + "\n")
        self._notes.flush()


class JsonOutput:
    """For programs: one object a line; what only people care about goes to the other stream."""

    def __init__(self, objects: TextIO, notes: TextIO, texts: Texts) -> None:
        self._objects = objects
        self._notes = notes
        self._texts = texts

    async def piece(self, text: str) -> None:
        """Nothing: a turn is one object."""

    def answered(self, result: TurnResult) -> None:
        """The turn."""
        self._line(encoded(turn_record(result)))

    def failed(self, error: MemoraError) -> None:
        """The error, in the place of the turn."""
        self._line(error_record(error.code, str(error)))

    def unknown(self, word: UnknownWord) -> None:
        """An error too: the line was not sent."""
        hint = self._texts.did_you_mean if word.guess else self._texts.unknown_word
        self._line(error_record("unknown_command", hint.format(word=word.word, guess=word.guess)))

    async def tell(self, text: str) -> None:
        """A line for the person behind the program."""
        self._notes.write(f"memora: {text}\n")
        self._notes.flush()

    async def noticed(self, notice: FoldNotice) -> None:
        """Nothing: the figures of the next turn say it."""

    async def history(self, session: Session) -> None:
        """One object, written message by message."""
        head = encoded({"type": "history", "conversation": session.conversation_id})
        self._objects.write(head[:-1] + ', "messages": ')
        try:
            await write_array(_history_records(session), self._objects)
        except MemoraError:
            self._line("")  # what follows begins on a line of its own
            raise
        self._line("}")

    async def context(self, session: Session) -> None:
        """One object."""
        record = context_record(session.conversation_id, await session.context(), session.max_input_tokens)
        self._line(encoded(record))

    async def summary(self, session: Session) -> None:
        """One object."""
        self._line(encoded(summary_record(session.conversation_id, await session.picture())))

    def help(self) -> None:
        """One object."""
        self._line(encoded({"type": "help", "text": self._texts.words_help}))

    def _line(self, text: str) -> None:
        self._objects.write(text + "\n")
        self._objects.flush()


async def _history_records(session: Session) -> AsyncIterator[Record]:
    picture = await session.picture()
    if picture:
        async for entry in session.history(picture):
            yield {**exported_message(entry.position, entry.message), "state": entry.state}


async def obey(word: Word, session: Session, output: Output) -> None:
    """Do what one of the words says; leaving is the caller's business.

    Raises:
        ConversationDeleted, StoreError.
    """
    match word:
        case Word.HISTORY:
            await output.history(session)
        case Word.CONTEXT:
            await output.context(session)
        case Word.SUMMARY:
            await output.summary(session)
        case Word.HELP:
            output.help()
        case Word.EXIT:
            pass
