"""The language half of the offline model: it keeps, drops, finds and quotes sentences, in English and Chinese.

It owns what is worth remembering, how a summary is laid out in one line, and how an answer is worded. It must not
invent a word about the user: everything it says about earlier talk is a quotation. No clock, no randomness, no
state beside its arguments; the time it takes grows with the length of the text and no faster.

The files from the ground up, each using only those before it: `utterances`, `cues`, `characters`, `sentences`, `terms`
and `facts`; `pieces`, their `notation` in a summary, `messages` and `corrections`; `filling` and `composing` make a
summary; `concepts`, `questions`, `matching`, `phrases` and `answering` make an answer.
"""

from memora.offline_model.extractive.answering import answer
from memora.offline_model.extractive.composing import shorten, summarise
from memora.offline_model.extractive.utterances import OWN_MARKS, Utterance, is_own_reply

__all__ = ["OWN_MARKS", "Utterance", "answer", "is_own_reply", "shorten", "summarise"]
