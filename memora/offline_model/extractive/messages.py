"""What messages say: their sentences, without pleasantries in front, and a question down to what was said before it.

Must not judge what a sentence is worth. The offline model's own replies say nothing new, so they are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from memora.offline_model.extractive.characters import comparable
from memora.offline_model.extractive.cues import Cue
from memora.offline_model.extractive.facts import FIRST_PERSON, QUESTION
from memora.offline_model.extractive.notation import split_day
from memora.offline_model.extractive.pieces import Piece
from memora.offline_model.extractive.sentences import sealed, sentences
from memora.offline_model.extractive.utterances import Utterance, is_own_reply

_BULLETS = re.compile(r"(?:[-*•>#]+\s+)+")
_OPENER = Cue(
    r"(?:hi|hello|hey|ok(?:ay)?|yes|yeah|well|sure|oh|wow|haha|by the way|thanks|thank you|alright)(?: there)?[,!]\s+",
    r"(?:你好|您好|嗨|好的|是的|好啊|好吧|嗯|哇|哈哈|对了|對了|对啊|對啊|谢谢|謝謝|谢谢你|謝謝你|另外|还有|還有|那么|那麼|那)[，,！!]\s*",
)
_CLAUSE_COMMA = re.compile(r"，|, ")
_INTERROGATIVE = Cue(
    r"^(?:and |but |so )?(?:do|does|did|is|are|can|could|would|will|what|which|who|when|where|how|why|any)\b",
    "什么|怎么|哪|谁|多少|[吗呢]$|^你|有没有|能不能|可不可以",
)
_CONDITIONAL = Cue(
    "^(?:if|when|since|because|do|does|can|could|would|what|how)", "^(?:如果|要是|当|因为|你|请|可以|能)"
)


def read_messages(messages: Iterable[Utterance], day: str) -> tuple[list[Piece], str]:
    """The sentences of the messages, oldest first, and the day that the last of them belongs to."""
    pieces: list[Piece] = []
    for message in messages:
        if message.role == "assistant" and is_own_reply(message.content):
            continue
        for marked in sentences(message.content):
            sentence, day = split_day(marked, day)
            text = _refined(sentence, message.role)
            if text:
                pieces.append(Piece(text, message.role, day))
    return pieces, day


def _refined(sentence: str, role: str) -> str:
    """The sentence without opening pleasantries, and a user's question down to the statement it began with."""
    sentence = sentence.lstrip()
    while opener := _OPENER.pattern.match(sentence) or _BULLETS.match(sentence):
        sentence = sentence[opener.end() :]
    text = sealed(sentence)
    if text and role == "user" and QUESTION.is_in(comparable(text)):
        return _statement_before_question(text) or text
    return text


def _statement_before_question(question: str) -> str:
    """What the user says of themselves before asking: "I have an exam in May, how do I prepare?"; may be empty."""
    clauses = _CLAUSE_COMMA.split(question)[:-1]
    while clauses and _INTERROGATIVE.is_in(comparable(clauses[-1].strip())):
        clauses.pop()
    if not clauses:
        return ""
    last = clauses[-1]
    statement = question[: question.index(last, sum(map(len, clauses[:-1]))) + len(last)]
    compared = comparable(statement)
    return "" if _CONDITIONAL.is_in(compared) or not FIRST_PERSON.is_in(compared) else sealed(statement)
