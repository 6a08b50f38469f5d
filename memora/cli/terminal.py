"""A chat in a terminal: a prompt with history and editing, answers that stream below it, notices that slide in above.

Owns keys, the prompt and the state of the terminal, which it leaves as it found it. While an answer streams, keys are
kept for the next prompt and only Ctrl-C is heard.
"""

from __future__ import annotations

import itertools
import signal
import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anyio
from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.patch_stdout import patch_stdout

from memora.chat import TurnResult
from memora.cli.keyboard import append_typed, read_typed
from memora.cli.output import TextOutput, obey
from memora.cli.session import Session
from memora.cli.texts import Texts
from memora.cli.words import Message, UnknownWord, Word, understand
from memora.errors import MemoraError

_PROMPT: Final = "> "
_CONTINUATION: Final = "  "
_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAME_SECONDS: Final = 0.1
_INPUT_MODES, _LOCAL_MODES, _CONTROL_CHARACTERS = 0, 3, 6
"""Where `termios` keeps them in its list."""

_LONGEST_PUT_BACK: Final = 4_000
"""A longer text is not put back into the prompt, where editing it would be slow; the Up key has it."""


class TerminalOutput(TextOutput):
    """Everything on the one terminal; notices go above the prompt if there is one, else after the answer."""

    def __init__(self, texts: Texts) -> None:
        super().__init__(sys.stdout, sys.stdout, texts)
        self._is_spinning = False
        self.is_prompting = False

    async def piece(self, text: str) -> None:
        """The first piece takes the place of the spinner."""
        self._clear_spinner()
        await super().piece(text)

    def answered(self, result: TurnResult) -> None:
        """The figures, and an empty line before the next prompt."""
        self._clear_spinner()
        super().answered(result)

    def failed(self, error: MemoraError) -> None:
        """The error, in the place of the spinner."""
        self._clear_spinner()
        super().failed(error)

    def interrupted(self) -> None:
        """The person did not want to hear more."""
        self._clear_spinner()
        self.end_line()
        self._note(self._note_style.warning(self._texts.interrupted))
        self._tell_waiting()

    @property
    def _is_answering(self) -> bool:
        return self._is_spinning or super()._is_answering

    async def _tell(self, line: str) -> None:
        if self.is_prompting:
            await run_in_terminal(lambda: self._note(line))
        else:
            await super()._tell(line)

    async def tell(self, text: str) -> None:
        """A line; that it comes from us goes without saying here."""
        await self._tell(self._note_style.warning(text))

    def hint(self, text: str) -> None:
        """Something small that helps."""
        self._note(self._note_style.dim(text))

    async def spin(self) -> None:
        """Show that the model has been asked, until its first piece arrives."""
        self._is_spinning = True
        for frame in itertools.cycle(_FRAMES):
            if not self._is_spinning:
                return
            self._answers.write(f"\r{frame} ")
            self._answers.flush()
            await anyio.sleep(_FRAME_SECONDS)

    def _clear_spinner(self) -> None:
        if self._is_spinning:
            self._is_spinning = False
            self._answers.write("\r  \r")
            self._answers.flush()


class TypedHistory(History):
    """The history of the prompt, kept in a file."""

    def __init__(self, directory: Path, conversation_id: str) -> None:
        super().__init__()
        self._directory = directory
        self._conversation_id = conversation_id

    def load_history_strings(self) -> Iterable[str]:
        """Newest first."""
        return read_typed(self._directory)

    def store_string(self, string: str) -> None:
        """Append one entry."""
        append_typed(self._directory, self._conversation_id, string)


class TerminalChat:
    """Takes turns from a person at a terminal."""

    def __init__(self, session: Session, output: TerminalOutput, texts: Texts, directory: Path) -> None:
        self._session = session
        self._output = output
        self._texts = texts
        self._stoppable: anyio.CancelScope | None = None
        self._empty_interrupts = 0
        self._prompt: PromptSession[str] = PromptSession(
            history=TypedHistory(directory, session.conversation_id),
            key_bindings=self._keys(),
            multiline=True,
            prompt_continuation=_CONTINUATION,
            enable_suspend=True,
        )

    def take_signal(self, number: signal.Signals) -> bool:
        """Ctrl-C stops what is being answered or typed, not the chat. Any other signal is not for us."""
        if number is not signal.SIGINT:
            return False
        if self._stoppable:
            self._stoppable.cancel()
        elif self._output.is_prompting:
            self._interrupt_typing()
        else:
            return False
        return True

    async def converse(self) -> None:
        """Until Ctrl-D or exit."""
        unsent = ""
        while True:
            typed = await self._ask(unsent)
            entry = understand(typed or "")
            if typed is None or entry is Word.EXIT:
                return
            unsent = await self._take(entry) if typed.strip() else ""

    async def _ask(self, text: str) -> str | None:
        """Let the person type, starting from `text`; None when they leave."""
        self._empty_interrupts = 0
        self._output.is_prompting = True
        try:
            with patch_stdout(raw=True):
                return await self._prompt.prompt_async(_PROMPT, default=text, handle_sigint=False)
        except EOFError:
            return None
        finally:
            self._output.is_prompting = False

    async def _take(self, entry: Message | Word | UnknownWord) -> str:
        """Do what was typed. Returns what is to be typed again, "" after a success."""
        match entry:
            case Word():
                await self._obey(entry)
            case UnknownWord():
                self._output.unknown(entry)
            case Message(text):
                return "" if await self._answer(text) else _short_enough(text)
        return ""

    async def _answer(self, text: str) -> bool:
        """One turn, stoppable until it is stored. Returns whether it is."""
        result, error = None, None
        async with anyio.create_task_group() as spinning:
            spinning.start_soon(self._output.spin)
            with self._stopping_point():
                try:
                    result = await self._session.reply(text, self._output.piece)
                except MemoraError as failure:
                    error = failure
            spinning.cancel_scope.cancel()
        if result:
            self._output.answered(result)
        elif error:
            self._output.failed(error)
            self._output.hint(self._texts.not_stored)
        else:
            self._output.interrupted()
        return result is not None

    async def _obey(self, word: Word) -> None:
        with self._stopping_point():
            try:
                await obey(word, self._session, self._output)
            except MemoraError as error:
                self._output.failed(error)

    @contextmanager
    def _stopping_point(self) -> Iterator[None]:
        """Ctrl-C ends what happens inside, and nothing else."""
        with anyio.CancelScope() as scope:
            self._stoppable = scope
            try:
                yield
            finally:
                self._stoppable = None

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def _send(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        def _interrupt(_: KeyPressEvent) -> None:
            self._interrupt_typing()

        return keys

    def _interrupt_typing(self) -> None:
        """Clear what is typed; who presses Ctrl-C on an empty line again is told how to leave."""
        buffer = self._prompt.default_buffer
        self._empty_interrupts = 0 if buffer.text else self._empty_interrupts + 1
        buffer.reset()
        if self._empty_interrupts > 1:
            run_in_terminal(lambda: self._output.hint(self._texts.leave_hint))


@contextmanager
def quiet_keys() -> Iterator[None]:
    """Keep the terminal from showing keys while nobody reads them: they wait for the next prompt. Ctrl-C still works.

    However the block ends, the terminal is as it was before.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = termios.tcgetattr(descriptor)
    quiet[_INPUT_MODES] &= ~termios.ICRNL
    quiet[_LOCAL_MODES] &= ~(termios.ECHO | termios.ICANON)
    quiet[_CONTROL_CHARACTERS][termios.VMIN] = 1
    quiet[_CONTROL_CHARACTERS][termios.VTIME] = 0
    try:
        termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _short_enough(text: str) -> str:
    return text if len(text) <= _LONGEST_PUT_BACK else ""
