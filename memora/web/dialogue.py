"""What a request says: its instructions, the messages before the question, and the question.

Owns how messages of both APIs are read, and that only text can be. Must not know what happens to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from memora.core.conversation import Message, check_text, is_blank
from memora.web.errors import invalid, unsupported
from memora.web.wire import ChatMessage, Item, Part

Count = Callable[[str, str], Message]
"""Makes a counted message of a role and a text."""

_SPOKEN: Final = ("user", "assistant")
_TOLD: Final = ("developer", "system")
_TEXT_PARTS: Final = ("input_text", "output_text", "text", None)


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a request, and the parameter it came in."""

    role: str
    text: str
    param: str
    phase: str | None = None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A request's messages: `text` is the question, `before` what was said before it."""

    instructions: str | None
    before: tuple[Said, ...]
    text: str

    def messages(self, count: Count, max_chars: int) -> tuple[Message, ...]:
        """What was said before the question, as messages of a history; those that say nothing are left out.

        Raises:
            InvalidMessage: one cannot be taken.
        """
        return counted([said for said in self.before if not is_blank(said.text)], count, max_chars)


def counted(said: Sequence[Said], count: Count, max_chars: int) -> tuple[Message, ...]:
    """Messages of a history.

    Raises:
        InvalidMessage: one cannot be taken.
    """
    return tuple(
        replace(count(message.role, check_text(message.text, max_chars)), phase=message.phase) for message in said
    )


def dialogue_of(instructions: str | None, said: Sequence[Said], param: str) -> Dialogue:
    """Sort a request's messages: what developers and systems say are instructions for this request alone.

    Raises:
        Refused: the last message is not a user's.
    """
    spoken = [message for message in said if message.role in _SPOKEN]
    if not spoken or spoken[-1].role != "user":
        raise invalid(f"The last message of '{param}' has to be the user's.", param)
    told = [message.text for message in said if message.role in _TOLD]
    together = "\n\n".join(text for text in (instructions, *told) if text)
    return Dialogue(together if instructions is not None or told else None, tuple(spoken[:-1]), spoken[-1].text)


def read_input(given: str | Sequence[Item] | None) -> list[Said]:
    """The messages of a Responses request.

    Raises:
        Refused: an item is no message, or holds something other than text.
    """
    if isinstance(given, str):
        return [Said("user", given, "input")]
    return read_items(given or (), "input")


def read_items(items: Sequence[Item], param: str) -> list[Said]:
    """The messages that these items are.

    Raises:
        Refused: as `read_input`.
    """
    return [_read_item(item, f"{param}[{place}]") for place, item in enumerate(items)]


def read_chat(messages: Sequence[ChatMessage]) -> list[Said]:
    """The messages of a chat completion.

    Raises:
        Refused: one belongs to a tool, or holds something other than text.
    """
    return [_read_chat_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _read_item(item: Item, param: str) -> Said:
    if item.type not in (None, "message"):
        raise unsupported(f"{param}.type", f"Items of type '{item.type[:64]}' are")
    if item.role is None or item.content is None:
        name = "role" if item.role is None else "content"
        raise invalid(f"Missing required parameter: '{param}.{name}'.", f"{param}.{name}", code=_MISSING)
    return Said(_role(item.role, param), _text(item.content, f"{param}.content"), param, item.phase)


def _read_chat_message(message: ChatMessage, param: str) -> Said:
    if message.role in ("tool", "function") or message.tool_calls:
        raise unsupported(f"{param}.{'tool_calls' if message.tool_calls else 'role'}", "Tools are")
    return Said(_role(message.role, param), _text(message.content or "", f"{param}.content"), param)


def _role(role: str, param: str) -> str:
    if role not in (*_SPOKEN, *_TOLD):
        raise invalid(f"Invalid '{param}.role': it is one of user, assistant, developer, system.", f"{param}.role")
    return role


def _text(content: str | Sequence[Part], param: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{param}[{place}]") for place, part in enumerate(content))


def _part(part: Part, param: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in _TEXT_PARTS:
        raise unsupported(param, f"Parts of type '{part.type[:64] if part.type else ''}' are")
    if part.text is None:
        raise invalid(f"Missing required parameter: '{param}.text'.", f"{param}.text", code=_MISSING)
    return part.text


_MISSING: Final = "missing_required_parameter"
