"""Cutting and measuring of texts in any script."""

from __future__ import annotations

from time import perf_counter

import pytest
from any_text import texts
from hypothesis import given
from hypothesis import strategies as st

from memora.core.text import character_ends, count_words, cut_to_fit, han_share, sentence_ends, split_to_fit

FAMILY = "👩‍👩‍👧‍👦"
SEEN_AS_ONE = (
    *(
        FAMILY,
        "👍🏽",
        "🇹🇼",
        "❤️",
        "1️⃣",
        "🏴\U000e0067\U000e0062\U000e007f",
        "e\u0301",
        "ก็",
        "नि",
        "👩🏽‍🚀",
        "g\u0308\u0323",
        "각",
    ),
    *("a", "`", "^", "台", "\r\n", " "),
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", 0, id="nothing"),
        pytest.param("  \n ", 0, id="blanks"),
        pytest.param("The user lives in Taipei.", 5, id="english"),
        pytest.param("don't well-known", 2, id="apostrophes-and-hyphens-join"),
        pytest.param("don’t", 1, id="curly-apostrophe"),
        pytest.param("-- ... !?", 0, id="marks-alone"),
        pytest.param("3 cats, 2026", 3, id="numbers"),
        pytest.param("café café", 2, id="accents"),
        pytest.param("cafe\u0301s cafe\u0301s", 2, id="accents-as-combining-marks"),
        pytest.param("使用者住在台北", 4, id="seven-chinese-characters"),
        pytest.param("使用者，住在「台北」。", 4, id="chinese-punctuation-is-no-word"),
        pytest.param("私はコーヒーが好き", 5, id="japanese"),
        pytest.param("저는 서울에 삽니다", 3, id="korean-has-spaces"),
        pytest.param("下個月考 TOEIC 和 IELTS", 5, id="chinese-and-english"),
        pytest.param("नमस्ते दुनिया", 2, id="hindi"),
        pytest.param("👩‍👩‍👧‍👦 👍🏽", 0, id="emoji"),
        pytest.param("𠮷野家", 2, id="han-beyond-the-first-plane"),
    ],
)
def test_words_are_counted_in_every_script(text: str, words: int) -> None:
    """A spaced word is one word, two characters of a script without spaces are one, marks are none."""
    assert count_words(text) == words


@given(texts, texts)
def test_a_longer_text_has_no_fewer_words(text: str, more: str) -> None:
    """A cap in words can be searched for: a beginning never has more words than the whole."""
    assert count_words(text) <= count_words(text + more)


@pytest.mark.parametrize(
    ("text", "share"),
    [("", 0.0), ("123 !?", 0.0), ("abc", 0.0), ("台北", 1.0), ("台a", 0.5), ("かな", 0.0), ("👍", 0.0)],
)
def test_the_share_of_chinese_is_one_of_letters(text: str, share: float) -> None:
    """Digits, marks and emoji belong to no language."""
    assert han_share(text) == share


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        pytest.param("One. Two!  Three", ["One.", " Two!", "  Three"], id="english"),
        pytest.param("It is 3.14 or v1.2.3. Yes", ["It is 3.14 or v1.2.3.", " Yes"], id="a-dot-inside-a-number"),
        pytest.param('He said "no." Then', ['He said "no."', " Then"], id="closing-quote"),
        pytest.param("一。二！「三？」四", ["一。", "二！", "「三？」", "四"], id="chinese"),
        pytest.param("- a\n- b\n", ["- a\n", "- b\n"], id="list"),
        pytest.param("wait...what... ok", ["wait...what...", " ok"], id="dots"),
        pytest.param("", [""], id="nothing"),
    ],
)
def test_sentences_end_where_readers_see_them_end(text: str, sentences: list[str]) -> None:
    """In English after a mark and a blank, in Chinese after the mark, in lists with the line."""
    ends = sentence_ends(text)
    assert [text[start:end] for start, end in zip([0, *ends], ends, strict=False)] == sentences


@given(st.lists(st.sampled_from(SEEN_AS_ONE), min_size=1, max_size=12))
def test_a_cut_between_characters_tears_none(characters: list[str]) -> None:
    """Joined emoji, skin tones, flags, keycaps, tags and combining marks stay with what they belong to."""
    text = "".join(characters)
    borders = {len("".join(characters[:count])) for count in range(1, len(characters) + 1)}
    assert set(character_ends(text)) == borders


@given(texts, st.integers(0, 60))
def test_a_cut_text_is_the_longest_tidy_beginning_that_fits(text: str, most: int) -> None:
    """The whole if it fits; else whole sentences, as many as fit; else whole characters; else what fits at all."""
    cut = cut_to_fit(text, lambda part: len(part) <= most)
    if len(text) <= most:
        assert cut == text
        return
    assert text.startswith(cut)
    assert len(cut) <= most
    assert cut == cut.rstrip()
    for ends in (sentence_ends(text), character_ends(text), range(1, len(text) + 1)):
        fitting = [head for end in ends if len(head := text[:end].rstrip()) <= most and head]
        if fitting:
            assert cut == fitting[-1]
            return
    assert cut == ""


@given(texts, st.integers(1, 60))
def test_parts_join_to_exactly_the_text(text: str, most: int) -> None:
    """Splitting loses no blank and no mark, and each part fits."""
    parts = split_to_fit(text, lambda part: len(part) <= most)
    assert "".join(parts) == text
    assert all(0 < len(part) <= most for part in parts)


@given(st.lists(st.sampled_from(SEEN_AS_ONE), max_size=30))
def test_parts_do_not_tear_a_character_that_fits(characters: list[str]) -> None:
    """Each part ends where a character ends, as long as every character is smaller than the room."""
    text = "".join(characters)
    borders = {len("".join(characters[:count])) for count in range(1, len(characters) + 1)}
    end = 0
    for part in split_to_fit(text, lambda part: len(part) <= 9):
        end += len(part)
        assert end in borders


def test_a_monster_of_one_character_is_cut_inside() -> None:
    """A letter under ten thousand accents is larger than any room; something of it is kept, and nothing hangs."""
    monster = "e" + "\u0301" * 10_000
    assert cut_to_fit(monster, lambda part: len(part) <= 10) == "e" + "\u0301" * 9
    assert "".join(split_to_fit(monster, lambda part: len(part) <= 10)) == monster


def test_a_part_that_cannot_fit_is_kept_all_the_same() -> None:
    """Without any room the text comes in single characters; cut, it is nothing."""
    assert split_to_fit("abc", lambda part: not part) == ["a", "b", "c"]
    assert cut_to_fit("abc", lambda part: not part) == ""


@pytest.mark.parametrize(
    "phrase",
    [
        *("word ", "我下個月要考試。", "嗯", FAMILY, "🇹🇼", "\u200d", "e\u0301", "`", "\n \n\t", ".)", "-"),
        "." * 99_999 + "x",
    ],
    ids=lambda phrase: ascii(phrase[:12]),
)
def test_a_cut_of_a_long_text_is_quick(phrase: str) -> None:
    """100,000 characters of anything are cut and split without a noticeable wait."""
    text = phrase * (100_000 // len(phrase))
    started = perf_counter()
    cut_to_fit(text, lambda part: len(part) <= 1_000)
    split_to_fit(text, lambda part: len(part) <= 10_000)
    count_words(text)
    assert perf_counter() - started < 3


def test_flags_in_a_row_are_cut_between_and_never_inside() -> None:
    """Two halves make a flag, however many flags stand before it."""
    assert character_ends("🇹🇼🇯🇵🇩🇪🇫🇷") == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("a\nb", [1, 2, 3]),
        ("a\rb", [1, 2, 3]),
        ("a\r\nb", [1, 3, 4]),
        ("e\u0300e", [2, 3]),
        ("e\u02ffe", [1, 2, 3]),
    ],
)
def test_only_what_is_joined_stays_together(text: str, ends: list[int]) -> None:
    """A line end of two characters and the first of all combining marks, and nothing beside them."""
    assert character_ends(text) == ends


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_a_character_longer_than_all_the_room_is_cut_inside(room: int) -> None:
    """As long as the room, from its first code point on."""
    text = "e" + "\u0301" * 4
    assert cut_to_fit(text, lambda part: len(part) <= room) == text[:room]
