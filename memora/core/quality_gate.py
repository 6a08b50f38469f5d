"""Whether a summariser's reply may become the summary.

Owns the verdict on the text of a complete reply. Must not know how the reply was obtained or what is stored next. Every
rejection here was produced by a real model.
"""

from __future__ import annotations

import json
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
    as_data,
    only_greetings_note,
)
from memora.core.text import count_words, cut_to_fit, han_share
from memora.core.tokens import DEFAULT_VOCABULARY, count_text_tokens, fits_in_tokens


@dataclass(frozen=True, slots=True)
class SummaryCap:
    """How long a stored summary may be; all caps hold."""

    max_words: int
    max_tokens: int
    vocabulary: str = DEFAULT_VOCABULARY

    @property
    def max_data_tokens(self) -> int:
        """Tokens of a summary as JSON in a request: only a text made of quotes and marks doubles, and it is cut."""
        return 2 * self.max_tokens

    def fits(self, text: str) -> bool:
        """Whether a text is within the caps."""
        return (
            fits_in_tokens(text, self.max_tokens, self.vocabulary)
            and fits_in_tokens(as_data(text), self.max_data_tokens, self.vocabulary)
            and count_words(text) <= self.max_words
        )

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
    trivial = all(is_trivial(piece.content) for piece in pieces) or _is_small_talk(reply, pieces)
    if trivial and not is_empty_reply(existing):
        return _capped(existing, cap)
    text, reason = _clean(reply)
    reason = reason or _fault(text) or _transcript_fault(text, pieces, strict=strict)
    if not reason and strict:
        reason = _suspicion(text, existing, pieces)
    if reason and trivial:
        chinese = any(han_share(piece.content) for piece in pieces)
        return Accepted(cap.cut(only_greetings_note(chinese=chinese)))
    return Rejected(reason) if reason else _capped(text, cap)


def judge_shortened(reply: str, long_text: str, cap: SummaryCap) -> str:
    """The summary after one request to shorten it: the reply if it is a summary, else the long text, cut to the cap."""
    text, reason = _clean(reply)
    cut = cap.cut(long_text)
    reason = reason or _fault(text) or _transcript_fault(text, (), strict=True) or _suspicion(text, cut, ())
    return cut if reason or count_words(text) >= count_words(long_text) else cap.cut(text)


def _is_small_talk(reply: str, pieces: Sequence[Piece]) -> bool:
    """Whether the user only greeted or nodded and the model, in so many words, found nothing to keep."""
    said = [piece.content for piece in pieces if piece.role == "user"]
    return bool(said) and all(map(is_trivial, said)) and is_empty_reply(reply) and bool(_bare(reply))


def is_trivial(text: str) -> bool:
    """Whether a message is nothing but a greeting, thanks or a nod, in English or Chinese."""
    return bool(_TRIVIAL.fullmatch(_bare(text)))


def is_empty_reply(text: str) -> bool:
    """Whether a reply says nothing: blank, only marks, or a word for nothing ("NONE", "(empty)", "（空）")."""
    bare = _bare(text)
    return bare in _WORDS_FOR_NOTHING or not any(character.isalnum() for character in bare)


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

# No "yes" and no "no": they may decide what was asked in a message that is folded already.
_TRIVIAL_WORDS: Final = (
    *("hi+", "hey+a?", "hello+", "yo", "ok+", "okay", "k", "thanks?"),
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
    *("好", "好的", "好啊", "嗯+", "喔", "哦", "不客氣", "不客气", "再見", "再见"),
    *("掰掰", "拜拜", "收到", "了解", "知道了", "沒問題", "没问题", "有什麼可以幫你", "有什麼可以幫您"),
)
# Longest first and atomic: a word once taken is never reconsidered, so no text can make the match slow.
_TRIVIAL: Final = re.compile(rf"(?:(?>{'|'.join(sorted(_TRIVIAL_WORDS, key=len, reverse=True))})\s*+)*+")


def _capped(text: str, cap: SummaryCap) -> Accepted | TooLong:
    return Accepted(text) if cap.fits(text) else TooLong(text)


def _clean(reply: str) -> tuple[str, str]:
    """Take off what wraps a good reply; the second part is the reason when nothing good can be inside."""
    text, finished = _without_reasoning(_UNWANTED.sub("", reply.replace("\r\n", "\n")))
    if not finished:
        return text, "unfinished reasoning"
    text = _without_label(text.strip())
    fenced = _FENCED.fullmatch(text)
    if fenced:
        text = fenced["inside"].strip()
    return _without_label(_json_value(text)), ""


_UNWANTED: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f\x85\ufeff\ud800-\udfff]")
"""Controls, byte-order marks and lone surrogates: a model's slips, which no summary needs."""


def _without_reasoning(text: str) -> tuple[str, bool]:
    """The text outside of reasoning blocks, and whether each block is closed; one pass, however many tags there are."""
    kept: list[str] = []
    end, open_tag = 0, ""
    for tag in _REASONING_TAG.finditer(text):
        if not tag["name"]:
            continue
        name = tag["name"].lower()
        if not open_tag and not tag["closing"]:
            kept.append(text[end : tag.start()])
            open_tag = name
        elif tag["closing"] and name == open_tag:
            end, open_tag = tag.end(), ""
        elif not open_tag:
            return text, False
    return "".join((*kept, text[end:])), not open_tag


_REASONING_NAMES: Final = "think|thinking|thought|reasoning|reflection|scratchpad|analysis"
# The first branch is a tag in quotes: the conversation is about it.
_REASONING_TAG: Final = re.compile(
    rf"[`\"'“「]</?(?:{_REASONING_NAMES})>[`\"'”」]|[<\[](?P<closing>/?)(?P<name>{_REASONING_NAMES})[>\]]",
    re.IGNORECASE,
)
_FENCED: Final = re.compile(r"```(?:[A-Za-z]*[ \t]*\n)?(?P<inside>(?:(?!```).)*+)```", re.DOTALL)


def _without_label(text: str) -> str:
    return _LABEL.sub("", text, count=1).strip()


_LABEL: Final = re.compile(
    r"\A[#*_>\s\[【「]{0,8}(?:here(?:['’]s| is) )?(?:the |an? |your )?"
    r"(?:(?:new|updated|merged|running|conversation) ){0,3}"
    r"(?:以下是|以下為|这是|這是)?(?:新的|新|更新後的|更新后的|更新|合併後的|對話|对话|目前){0,3}"
    r"(?:summary(?: of the conversation)?|摘要|總結|总结)"
    r"[*_\]】」]{0,4}\s{0,2}(?:[:：][*_\]】」]{0,4}|(?=\n)|\Z)",
    re.IGNORECASE,
)


def _json_value(text: str) -> str:
    """The summary inside of a JSON object that holds nothing else: a model that reads JSON likes to write it."""
    if not (text.startswith("{") and text.endswith("}")):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    match list(value.items()):
        case [(str(key), str(inside))] if "summary" in key or "摘要" in key:
            return _UNWANTED.sub("", inside).strip()
    return text


def _fault(text: str) -> str:
    return next((name for name, found in _FAULTS if found(text)), "")


def _is_echo(text: str) -> bool:
    """Whether the reply repeats the frame of our prompt."""
    if any(key in text for key in _FRAME_KEYS) or any(opening in text for opening in INSTRUCTION_OPENINGS):
        return True
    first_line = text.lstrip().partition("\n")[0]
    return bool(_FRAME_HEADING.fullmatch(first_line)) or bool(_MESSAGE_RECORD.search(text))


def _transcript_fault(text: str, pieces: Sequence[Piece], *, strict: bool) -> str:
    """Whether the reply is the messages with role marks. One in the summariser's own words is only suspicious."""
    lines = [line for line in text.splitlines() if line.strip()][:_LOOKED_AT_LINES]
    spoken = [line[mark.end() :].strip() for line in lines if (mark := _SPOKEN_LINE.match(line))]
    copied = sum(any(words in piece.content for piece in pieces) for words in spoken if words)
    is_copy = copied and copied * 2 >= len(lines)
    is_script = len(spoken) >= 2 and len(spoken) * 2 >= len(lines)
    return "an echo of the messages" if is_copy or (strict and is_script) else ""


_LOOKED_AT_LINES: Final = 40

_FRAME_KEYS: Final = (
    f'"{NEW_MESSAGES_KEY}"',
    f'"{EXISTING_SUMMARY_KEY}"',
    f'"{SHORTEN_KEY}"',
    f"<{SUMMARY_FENCE}",
    f"</{SUMMARY_FENCE}",
)
_FRAME_HEADING: Final = re.compile(
    r"\W{0,12}(?:existing[ _]summary|new[ _]messages|summary[ _]to[ _]shorten|現有摘要|新訊息|新消息)\W*(?:[:：].*)?",
    re.IGNORECASE,
)
_SPOKEN_LINE: Final = re.compile(
    r"\W{0,12}(?:user|assistant|system|human|ai|使用者|用戶|用户|助理|助手)(?:\W{0,3}[:：]\W{0,3}|[*_]{0,2}[\]】]\W{0,3})",
    re.IGNORECASE,
)
_MESSAGE_RECORD: Final = re.compile(r'"role"\s{0,4}:\s{0,4}"(?:user|assistant)"')


def _is_refusal(text: str) -> bool:
    return len(text) < 300 and bool(_REFUSAL.match(text))


_REFUSAL: Final = re.compile(
    r"(?:i['’]?m|i am) (?:sorry|unable)|sorry,? (?:but )?i"
    r"|i can(?:['’]t|not) (?:help|assist|do|provide|summari|comply|fulfil|process|create|write)|as an ai\b"
    r"|(?:很)?(?:抱歉|對不起|对不起)，?我?(?:無法|无法|不能)|我(?:無法|无法|不能)(?:協助|协助|提供|幫|帮|摘要)",
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
