"""What a message wants: an answer, a list of all that is known, a piece of work, or nothing but to be heard.

Owns the words by which questions are known. Must not look at what was said earlier.
"""

from __future__ import annotations

from typing import Final

from memora.offline_model.extractive.characters import comparable
from memora.offline_model.extractive.cues import Cue
from memora.offline_model.extractive.facts import CALLED_OR_NAME_VALUE, DATE_VALUE, QUESTION, TITLE_VALUE

_CLASSIFIED_CHARS: Final = 500  # of the beginning and of the end: what a message wants is said there

_ASKS = Cue(
    r"^(?:and |so |but )?(?:what|which|who|whose|when|where|why|how|do|does|did|is|are|was|were|am|have|has|can|could|"
    r"will|would)\b|\bremind me\b|\bdo you remember\b|\btell me (?:again )?(?:what|which|who|when|where|why|how|my)\b|"
    r"^(?:please )?(?:list|show|give|tell)(?: me)? (?:about )?my\b",
    "(?:什么|甚么|哪|谁|多少|几(?!乎)|怎么|为什么|何时|还记得)[^。.!]*$",
)
OVERVIEW = Cue(
    r"\bwhat (?:do|can) you (?:still )?(?:know|remember|recall)(?: about me)?[?.]?$|"
    r"\b(?:know|remember|recall|learned) (?:\w+ )?about me\b|\bwho am i\b|"
    r"\bwhat (?:did|have) i (?:tell|told|said|say)(?: you)?(?: about (?:me|myself))?(?: so far| before)?[?.]?$",
    "我是谁|(?:记得|知道|了解)(?:关于)?我(?:的)?(?:什么|哪些|多少|吗)|我(?:跟|和|对)你(?:说|讲)过(?:什么|哪些)",
)
REQUEST = Cue(
    r"^(?:(?:ok|okay|hi|hello|now|and|so|then|well)[,!. ]+)?(?:please[, ]+)?"
    r"(?:(?:can|could|would|will) you (?:please )?|i(?:'d like| want| need) you to |help me |let's )?"
    r"(?:teach|explain|translate|write|help|correct|recommend|suggest|make|create|define|check|practi[cs]e|describe|"
    r"compare|summari[sz]e|rewrite|fix|(?:give|show|list|tell)(?! (?:me )?(?:again )?"
    r"(?:(?:about )?(?:my|what|which|who|when|where|why|how)|about me)\b))\b",
    "^(?:好的?,?)?(?:请(?!问|记|叫|用|以|不|别|告|提醒)|你?(?:可不可以|能不能|可以|能)?(?:教我|教|解释|翻译|写|给我|帮我|推荐|"
    "列出|列|举例|造句|介绍|说明|改写|修改|比较|示范|出题))",
)
ABOUT_MEMORY = Cue(
    r"\b(?:i|i'm|me|my|mine|we|our|remember|earlier|did you|have you|"
    r"you (?:said|told|recommended|suggested|mentioned))\b",
    "[我咱俺]|记得|之前|刚才|曾经",
)
_ABOUT_THE_ASSISTANT = Cue(
    r"\b(?:did|have) you (?:\w+ )?(?:recommend|suggest|say|tell|mention|give)|"
    r"\byou (?:recommended|suggested|said|told|gave)\b|\byour (?:recommendation|suggestion|advice)",
    "你.{0,6}(?:推荐|建议|说|提|讲|告诉|给).{0,4}(?:我|过)|你的(?:建议|推荐)",
)

# (what a question asks for, what an answer to it then has).
_ANSWER_TYPES: Final = (
    (Cue(r"\bwhen\b|\bwhat (?:day|date|time|month)\b", "什么时候|何时|几月|几号|哪天|几点|哪一天"), DATE_VALUE),
    (Cue(r"\bhow (?:many|much|old|long)\b", "多少|几"), Cue(r"\d", "[一二两三四五六七八九十百千]")),
    (Cue(r"\bname\b|\bcalled\b|\bwho\b", "名字|叫什么|谁"), CALLED_OR_NAME_VALUE),
    (Cue(r"\b(?:book|novel|movie|film|song|title)\b", "书|小说|电影|歌|片"), TITLE_VALUE),
    (Cue(r"\bwhere\b", "哪里|哪儿|什么地方"), Cue(r"\b(?:in|at|from|to)\b", "[在去住到]")),
)


def gist(message: str) -> str:
    """The comparable beginning and end of a message, which tell what is wanted."""
    line = " ".join(message.split())
    if len(line) > 2 * _CLASSIFIED_CHARS:
        line = f"{line[:_CLASSIFIED_CHARS]} {line[-_CLASSIFIED_CHARS:]}"
    return comparable(line)


def asks(question: str) -> bool:
    """Whether the message wants to know something; like all here, of its gist."""
    return QUESTION.is_in(question) or _ASKS.is_in(question)


def wanted_speaker(question: str) -> str:
    """Whose words are asked for: "user" or "assistant"."""
    return "assistant" if _ABOUT_THE_ASSISTANT.is_in(question) else "user"


def wanted_values(question: str) -> list[Cue]:
    """What a sentence that answers it has, one of these or more; empty if that cannot be told."""
    return [value for asked, value in _ANSWER_TYPES if asked.is_in(question)]
