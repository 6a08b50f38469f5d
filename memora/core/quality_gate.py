"""Whether a summariser's reply may become the summary.

Owns the verdict on the text of a complete reply. Must not know how the reply was obtained or what is stored next. Every
rejection here was produced by a real model.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memora.core.prompts import (
    EXISTING_SUMMARY_KEY,
    INSTRUCTION_OPENINGS,
    NEW_MESSAGES_KEY,
    SHORTEN_KEY,
    SUMMARY_FENCE,
    Piece,
)
from memora.core.text import count_words, cut_to_fit, han_share
from memora.core.tokens import DEFAULT_VOCABULARY, count_text_tokens, fits_in_tokens


@dataclass(frozen=True, slots=True)
class SummaryCap:
    """How long a stored summary may be; both caps hold."""

    max_words: int
    max_tokens: int
    vocabulary: str = DEFAULT_VOCABULARY

    def fits(self, text: str) -> bool:
        """Whether a text is within both caps."""
        return fits_in_tokens(text, self.max_tokens, self.vocabulary) and count_words(text) <= self.max_words

    def cut(self, text: str) -> str:
        """The longest beginning of a text within the caps, cut after a sentence where possible."""
        return cut_to_fit(text, self.fits)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The reply is the new summary; `text` is its cleaned form, or the old summary when nothing was worth adding."""

    text: str


@dataclass(frozen=True, slots=True)
class TooLong:
    """The reply would do but for its length."""

    text: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The reply must not become the summary."""

    reason: str


Verdict = Accepted | TooLong | Rejected


def judge_summary(
    reply: str, existing: str, pieces: Sequence[Piece], cap: SummaryCap, *, strict: bool = True
) -> Verdict:
    """Judge a complete reply to a fold request.

    `strict` also rejects what is merely suspicious (another language, most of a rich summary gone); a caller that has
    already tried again passes False, because a doubtful summary beats losing the messages.
    """
    trivial = all(is_trivial(piece.content) for piece in pieces)
    if existing and trivial:
        return Accepted(existing)
    text, reason = _clean(reply)
    reason = reason or next((name for name, found in _FAULTS if found(text)), "")
    if not reason and strict:
        reason = _suspicion(text, existing, pieces)
    if reason:
        return Rejected(reason)
    return Accepted(text) if cap.fits(text) else TooLong(text)


def judge_shortened(reply: str, long_text: str, cap: SummaryCap) -> str:
    """The summary after one request to shorten it: the reply if it is a summary, else the long text, cut to the cap."""
    text, reason = _clean(reply)
    unusable = bool(reason) or any(found(text) for _, found in _FAULTS) or count_words(text) >= count_words(long_text)
    return cap.cut(long_text if unusable else text)


def is_trivial(text: str) -> bool:
    """Whether a message is nothing but a greeting, thanks or a nod, in English or Chinese."""
    return bool(_TRIVIAL.fullmatch(_bare(text)))


def is_empty_reply(text: str) -> bool:
    """Whether a reply says nothing: blank, only marks, or a word for nothing ("NONE", "(empty)", "（空）")."""
    return _bare(text) in _WORDS_FOR_NOTHING


def _bare(text: str) -> str:
    """Letters and digits with single spaces, lower case: what is left when all decoration is taken away."""
    kept = [
        character if unicodedata.category(character)[0] in "LNM" else " "
        for character in unicodedata.normalize("NFKC", text)
        if unicodedata.category(character) != "Cf"
    ]
    return " ".join("".join(kept).casefold().split())


_WORDS_FOR_NOTHING: Final = frozenset(
    (
        *("", "none", "empty", "null", "nil", "nothing", "n a", "na", "text", "plaintext", "markdown", "json"),
        *("no summary", "empty summary", "no new information", "no meaningful information"),
        *("空", "无", "無", "沒有", "没有", "空白", "無內容", "无内容", "沒有摘要", "没有摘要", "無摘要", "无摘要"),
    )
)

_TRIVIAL_WORDS: Final = (
    *("hi+", "hey+a?", "hello+", "yo", "ok+", "okay", "k", "yes", "yeah", "yep", "no", "nope", "sure", "thanks?"),
    *("thank you", "thx", "ty", "great", "good", "cool", "nice", "fine", "bye", "goodbye", "see you", "lol", "haha+"),
    *("good morning", "good afternoon", "good evening", "good night", "there", "you too", "you re welcome", "got it"),
    *("alright", "how can i help you today", "how can i help you", "how can i help", "how are you"),
    *(
        "你好",
        "您好",
        "妳好",
        "嗨",
        "哈囉",
        "哈啰",
        "早",
        "早安",
        "午安",
        "晚安",
        "謝謝",
        "谢谢",
        "謝啦",
        "感謝",
        "感谢",
    ),
    *(
        "好",
        "好的",
        "好啊",
        "嗯+",
        "喔",
        "哦",
        "是",
        "是的",
        "對",
        "对",
        "不",
        "不會",
        "不客氣",
        "不客气",
        "再見",
        "再见",
    ),
    *("掰掰", "拜拜", "收到", "了解", "知道了", "沒問題", "没问题", "有什麼可以幫你", "有什麼可以幫您"),
)
# Longest first and atomic: a word once taken is never reconsidered, so no text can make the match slow.
_TRIVIAL: Final = re.compile(rf"(?:(?>{'|'.join(sorted(_TRIVIAL_WORDS, key=len, reverse=True))})\s*+)*+")


def _clean(reply: str) -> tuple[str, str]:
    """Take off what wraps a good reply; the second part is the reason when nothing good can be inside."""
    text = _REASONING.sub("", reply)
    if _OPEN_REASONING.search(text):
        return text, "unfinished reasoning"
    fenced = _FENCED.fullmatch(text.strip())
    text = (fenced["inside"] if fenced else text).strip()
    return _LABEL.sub("", text, count=1).strip(), ""


_REASONING: Final = re.compile(r"<(think|thinking|reasoning|thought|analysis)>.*?</\1>", re.DOTALL | re.IGNORECASE)
_OPEN_REASONING: Final = re.compile(r"</?(?:think|thinking|reasoning|thought|analysis)>", re.IGNORECASE)
_FENCED: Final = re.compile(r"```[A-Za-z]*\n?(?P<inside>.*?)\n?```", re.DOTALL)
_LABEL: Final = re.compile(
    r"\A\W{0,3}(?:new |updated |merged )?(?:summary|摘要|總結|总结)\W{0,3}[:：]\W{0,3}", re.IGNORECASE
)


def _is_echo(text: str) -> bool:
    """Whether the reply repeats the frame of our prompt or the messages as a transcript."""
    if any(key in text for key in _FRAME_KEYS) or any(opening in text for opening in INSTRUCTION_OPENINGS):
        return True
    lines = [line for line in text.splitlines() if line.strip()]
    spoken = sum(bool(_SPOKEN_LINE.match(line)) for line in lines)
    headed = bool(lines) and bool(_FRAME_HEADING.fullmatch(lines[0]))
    return headed or (spoken >= 2 and spoken * 2 >= len(lines)) or len(_MESSAGE_RECORD.findall(text)) >= 1


_FRAME_KEYS: Final = (
    f'"{NEW_MESSAGES_KEY}"',
    f'"{EXISTING_SUMMARY_KEY}"',
    f'"{SHORTEN_KEY}"',
    f"<{SUMMARY_FENCE}",
    f"</{SUMMARY_FENCE}",
)
_FRAME_HEADING: Final = re.compile(
    r"\W*(?:existing[ _]summary|new[ _]messages|summary[ _]to[ _]shorten|limits|現有摘要|新訊息|新消息)\W*.{0,20}",
    re.IGNORECASE,
)
_SPOKEN_LINE: Final = re.compile(
    r"\W*(?:user|assistant|system|human|ai|使用者|用戶|用户|助理|助手)\W{0,3}[:：]", re.IGNORECASE
)
_MESSAGE_RECORD: Final = re.compile(r'"role"\s*:\s*"(?:user|assistant)"')


def _is_refusal(text: str) -> bool:
    return len(text) < 300 and bool(_REFUSAL.match(text))


_REFUSAL: Final = re.compile(
    r"(?:i['’]?m|i am) (?:sorry|unable)|sorry,? (?:but )?i|i can(?:['’]t|not) (?:help|assist|do|provide|summari)"
    r"|(?:很)?(?:抱歉|對不起|对不起)，?我(?:無法|无法|不能)|我(?:無法|无法|不能)(?:協助|协助|提供|幫|帮|摘要)",
    re.IGNORECASE,
)

_FAULTS: Final = (("empty", is_empty_reply), ("an echo of the prompt", _is_echo), ("a refusal", _is_refusal))

_RICH_SUMMARY_TOKENS: Final = 60
_SHRUNK_TO: Final = 0.2
_CHINESE_TALK: Final = 0.7
_SOME_CHINESE: Final = 0.05


def _suspicion(text: str, existing: str, pieces: Sequence[Piece]) -> str:
    talk = " ".join((existing, *(piece.content for piece in pieces)))
    if han_share(talk) >= _CHINESE_TALK and han_share(text) < _SOME_CHINESE:
        return "in another language than the conversation"
    before = count_text_tokens(existing)
    if before >= _RICH_SUMMARY_TOKENS and count_text_tokens(text) < before * _SHRUNK_TO:
        return "most of the existing summary is gone"
    return ""
