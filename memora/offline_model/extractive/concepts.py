"""Search terms: beside its words, the everyday concepts (`#exam`) and calendar days (`@5-4`) a sentence speaks of.

Owns which words mean one thing in both languages, so that a question need not use the words of the fact. Must not
weigh what it finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from memora.offline_model.extractive.cues import Cue
from memora.offline_model.extractive.facts import I_AM_NAME
from memora.offline_model.extractive.terms import single_han, terms

_CONCEPTS: Final = (
    ("exam", "exam exams test tests", "考试|考|测验|检定"),
    ("name", "name names called named", "名字|叫|姓名|改名"),
    ("home", "live lives living home address", "住|家"),
    ("work", "work works working job occupation company profession", "工作|上班|职业|公司"),
    ("school", "school university college student study studying major", "学校|大学|学生|念书|读书"),
    ("birthday", "birthday born", "生日|出生"),
    ("age", "age old", "岁|年纪|几岁"),
    ("cat", "cat cats kitten kitty", "猫"),
    ("dog", "dog dogs puppy doggy", "狗"),
    ("pet", "pet pets cat dog kitten puppy", "宠物|猫|狗"),
    ("mother", "mother mom mum", "妈"),
    ("father", "father dad", "爸|父亲"),
    ("sister", "sister sisters", "姐|妹"),
    ("brother", "brother brothers", "哥|弟"),
    ("wife", "wife", "太太|老婆|妻子"),
    ("husband", "husband", "先生|老公|丈夫"),
    ("friend", "friend friends", "朋友"),
    (
        "like",
        "like likes love loves enjoy prefer favourite favorite hobby hobbies interest",
        "喜欢|最爱|爱好|兴趣|偏好",
    ),
    ("dislike", "hate dislike", "讨厌|不喜欢"),
    ("allergy", "allergic allergy allergies", "过敏"),
    ("food", "eat eating food dish dinner lunch cook", "吃|菜|料理"),
    ("drink", "drink drinking coffee tea", "喝|咖啡|茶"),
    ("book", "book books novel read reading", "书|小说"),
    ("film", "movie movies film films", "电影|片"),
    ("music", "music song songs", "音乐|歌"),
    ("trip", "trip travel visit vacation holiday", "旅行|旅游|出国"),
    ("plan", "plan plans planning going goal", "打算|计划|计画|目标"),
    ("recommend", "recommend recommended suggest suggested recommendation", "推荐|建议"),
    ("meeting", "meeting meet appointment interview", "开会|会议|约|面试"),
)
_PHRASED_CONCEPTS: Final = (
    ("#name", I_AM_NAME),
    ("#home", Cue(r"\bi(?:'m| am)\b.{0,30} from\b|\bi come from\b|\bam i from\b|\bdo i come from\b", "我来自")),
)
SUBJECTS: Final = frozenset(
    {
        *("#mother", "#father", "#sister", "#brother", "#wife", "#husband", "#friend", "#cat", "#dog"),
        *("#birthday", "#allergy"),
    }
)
"""Whom or what a question is about: where no sentence speaks of it, sentences about others are no answer."""


def _concepts_by_word(column: int, separator: str) -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for row in _CONCEPTS:
        for word in row[column].split(separator):
            table[word] = (*table.get(word, ()), f"#{row[0]}")
    return table


_ENGLISH_CONCEPTS: Final = _concepts_by_word(1, " ")
_CHINESE_CONCEPTS: Final = _concepts_by_word(2, "|")
_ENGLISH_WORD = re.compile(r"[a-z]+")
_CHINESE_WORD = Cue("|".join(sorted(_CHINESE_CONCEPTS, key=len, reverse=True)), is_case_sensitive=True)

_MONTHS_TEXT: Final = "january february march april may june july august september october november december"
_MONTHS: Final = _MONTHS_TEXT.split()
_MONTH: Final = rf"(?P<month>{'|'.join(f'{month}|{month[:3]}' for month in _MONTHS)})"
# In the order in which they are taken out of a sentence: what an earlier one took a later one does not see.
_CALENDAR_DAYS: Final = (
    Cue(r"(?<!\d)(?P<month>\d{1,2})(?:月|/|-)(?P<day>\d{1,2})(?!\d)", is_case_sensitive=True),
    Cue(rf"\b{_MONTH}\.? (?P<day>\d{{1,2}})(?:st|nd|rd|th)?\b", is_case_sensitive=True),
    Cue(rf"\b(?P<day>\d{{1,2}})(?:st|nd|rd|th)? (?:of )?{_MONTH}\b", is_case_sensitive=True),
)
_DIGIT = re.compile(r"\d")


def search_terms(comparable: str, day: str) -> frozenset[str]:
    """The terms of a sentence said on a day (may be empty), single Han characters, concepts and calendar days."""
    lowered = comparable.casefold()
    days = {*_calendar_days(lowered), *_calendar_days(day)}
    if days:
        lowered = _without_calendar_days(lowered)
    found = {*terms(lowered), *days, *single_han(lowered)}
    for word in _ENGLISH_WORD.findall(lowered):
        found.update(_ENGLISH_CONCEPTS.get(word, ()))
    if not lowered.isascii():
        for word in _CHINESE_WORD.pattern.findall(lowered):
            found.update(_CHINESE_CONCEPTS[word])
    found.update(concept for concept, phrase in _PHRASED_CONCEPTS if phrase.is_in(comparable))
    return frozenset(found)


def _calendar_days(lowered: str) -> Iterator[str]:
    if not _DIGIT.search(lowered):
        return
    for cue in _CALENDAR_DAYS:
        for found in cue.pattern.finditer(lowered):
            yield f"@{_month_number(found['month'])}-{int(found['day'])}"


def _without_calendar_days(lowered: str) -> str:
    for cue in _CALENDAR_DAYS:
        lowered = cue.pattern.sub(" ", lowered)
    return lowered


def _month_number(name: str) -> int:
    if name.isdecimal():
        return int(name)
    return next(number for number, month in enumerate(_MONTHS, 1) if month.startswith(name))
