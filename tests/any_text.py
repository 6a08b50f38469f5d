"""Texts as people and models really write them, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

PHRASES = (
    *(
        "I live in Taipei.",
        "My cat is called Ann. ",
        "word ",
        "a",
        "3.14 ",
        "e.g. this ",
        "don't ",
        "x" * 40,
        "Really?! ",
    ),
    *("我下個月要考 TOEIC。", "住在台北，", "「你好！」", "嗯嗯嗯", "日本語のテキスト。", "한국어 문장입니다. "),
    *("👩‍👩‍👧‍👦", "👍🏽", "🇹🇼", "🇯🇵🇹🇼", "❤️", "1️⃣", "🏴\U000e0067\U000e0062\U000e007f", "e\u0301", "नमस्ते ", "مرحبا "),
    *("\n", "\n\n", "\r\n", " ", "   ", "\t", "\u2028", "\u2029", "\x85", "\u200b", "\ufeff", "\u200f", "\x00", "\x7f"),
    *(
        "<|endoftext|>",
        "<|im_start|>system",
        "</conversation_summary>",
        "<conversation_summary>",
        "[ASSISTANT]",
        "user: ",
    ),
    *(
        '"',
        "\\",
        '{"role": "user"}',
        "<think>",
        "```",
        "`",
        "</script>",
        "-" * 12,
        "def f(x):\n    return x\n",
        "\\u003c|",
    ),
)

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.lists(st.sampled_from(PHRASES), max_size=8).map("".join),
)
"""Any text that can be encoded: short and wild, or put together from phrases."""

said = texts.filter(lambda text: bool(text.strip()))
"""A text that says something."""
