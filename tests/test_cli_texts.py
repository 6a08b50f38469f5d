"""The pure parts of the command line: its words, its lines, its catalogue, what a terminal is spared."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from string import Formatter
from typing import Any

import pytest

from memora.cli.lines import Line, LineReader
from memora.cli.render import padded
from memora.cli.streams import Style, harmless
from memora.cli.texts import CHINESE, ENGLISH, texts_for
from memora.cli.words import Message, UnknownWord, Word, understand


def fields_of(text: str) -> set[str]:
    """The names in braces."""
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


def words_of(catalogue: Mapping[str, Any]) -> dict[str, str]:
    """Every text by its name, those of catalogues inside the catalogue, too."""
    found: dict[str, str] = {}
    for name, text in catalogue.items():
        inside = words_of(text) if isinstance(text, dict) else {"": text}
        found |= {f"{name} {inner}".rstrip(): each for inner, each in inside.items()}
    return found


def test_both_languages_say_the_same_things() -> None:
    """Every text exists in both languages, says something, and is filled with the same figures."""
    english, chinese = words_of(asdict(ENGLISH)), words_of(asdict(CHINESE))
    assert english.keys() == chinese.keys()
    for name, text in english.items():
        assert text.strip()
        assert chinese[name].strip()
        assert fields_of(text) == fields_of(chinese[name]), name


@pytest.mark.parametrize(
    ("lang", "environment", "expected"),
    [
        (None, {}, ENGLISH),
        (None, {"LANG": "zh_TW.UTF-8"}, CHINESE),
        (None, {"LC_ALL": "en_US.UTF-8", "LANG": "zh_TW.UTF-8"}, ENGLISH),
        (None, {"MEMORA_LANG": "zh-TW", "LC_ALL": "C"}, CHINESE),
        ("en", {"LANG": "zh_TW.UTF-8"}, ENGLISH),
    ],
)
def test_the_language_follows_the_setting_and_then_the_locale(
    lang: str | None, environment: dict[str, str], expected: object
) -> None:
    """MEMORA_LANG wins over LC_ALL, that over LC_MESSAGES, that over LANG."""
    assert texts_for(lang, environment) is expected


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("history", Word.HISTORY),
        ("/exit  ", Word.EXIT),
        ("/help", Word.HELP),
        ("help", Message("help")),
        (" history", Message(" history")),
        ("\\history", Message("history")),
        ("\\/nope", Message("/nope")),
        ("\\frac{1}{2}", Message("\\frac{1}{2}")),
        ("history of Rome", Message("history of Rome")),
        ("/etc/passwd", Message("/etc/passwd")),
        ("/ 2", Message("/ 2")),
        ("/histroy", UnknownWord("/histroy", "/history")),
        ("/zzz", UnknownWord("/zzz", None)),
        ("\\" * 100_000, Message("\\" * 100_000)),
    ],
)
def test_a_word_is_ours_only_when_it_stands_alone(line: str, meaning: object) -> None:
    """Anything else is a message, exactly as typed; a backslash that frees a word is not part of it."""
    assert understand(line) == meaning


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"one\ntwo", [Line("one"), Line("two")]),
        (b"one\r\n\ntwo\n", [Line("one"), Line(""), Line("two")]),
        (b"\xef\xbb\xbfone\n\xef\xbb\xbftwo", [Line("one"), Line("\ufefftwo")]),
        ("長" * 10 + "\nnext", [Line("長" * 10), Line("next")]),
        (b"x" * 500 + b"\nnext", [Line("x" * 41, is_cut=True), Line("next")]),
        (b"broken \xff\n", [Line("broken \udcff")]),
        (b"a\x85b\x0bc\xe2\x80\xa8d\n", [Line("a\udc85b\x0bc\u2028d")]),
    ],
)
async def test_lines_end_at_line_feeds_and_hold_what_was_sent(data: bytes | str, lines: list[Line]) -> None:
    """A byte-order mark is dropped at the very start only; a line that is too long is cut and does not fill memory."""
    reading, writing = os.pipe()
    os.write(writing, data.encode() if isinstance(data, str) else data)
    os.close(writing)
    try:
        read = [line async for line in LineReader(reading, max_chars=10).lines()]
    finally:
        os.close(reading)
    assert [line.is_cut for line in read] == [line.is_cut for line in lines]
    assert [line.text for line in read if not line.is_cut] == [line.text for line in lines if not line.is_cut]


def test_controls_become_visible_and_text_stays_text() -> None:
    """Escape, bell, C1 and lone carriage returns are shown; tabs, newlines, accents, emoji and marks are left alone."""
    assert harmless("\x1b[2J\x07\x9b1m\ra\r\nb\tc\n") == r"\x1b[2J\x07\x9b1m\x0da" + "\nb\tc\n"
    text = "é 好 👩‍👩‍👧 \u202bעברית\u202c \ufeff"
    assert harmless(text) == text
    assert Style().data("\x1b[2J") == "\x1b[2J"


def test_labels_line_up_whatever_the_width_of_their_characters() -> None:
    """A wide character counts as two cells."""
    assert padded("訊息", 6) == "訊息  "
    assert padded("tokens", 6) == "tokens"
