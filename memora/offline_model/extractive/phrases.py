"""The wording of replies, in English and in Traditional Chinese.

Must not say anything about the user but in quotation marks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memora.offline_model.extractive.utterances import OWN_MARKS


@dataclass(frozen=True)
class Phrases:
    """The wording of one language; every reply is `mark` and then one or more of these."""

    mark: str
    said: dict[str, str]
    said_on: dict[str, str]
    from_summary: str
    between: str
    nothing_found: str
    nothing_yet: str
    cannot_do: str
    noted: tuple[str, ...]
    listening: str
    small_talk: tuple[str, str]
    quote: Callable[[str], str]


def _english_quote(text: str) -> str:
    return f"“{text}”" if '"' in text else f'"{text}"'


def _chinese_quote(text: str) -> str:
    return f"『{text}』" if "「" in text else f"「{text}」"


ENGLISH = Phrases(
    mark=OWN_MARKS[0],
    said={"user": "You said earlier: ", "assistant": "The assistant said earlier: "},
    said_on={"user": "You said on {day}: ", "assistant": "The assistant said on {day}: "},
    from_summary="From my summary of our earlier talk: ",
    between=" ",
    nothing_found=(
        f"{OWN_MARKS[0]} I have nothing about that in my context (the summary and the recent messages), and I only "
        "quote what was said there. For real answers set OPENAI_API_KEY."
    ),
    nothing_yet=f"{OWN_MARKS[0]} I know nothing about you yet. Tell me something, and ask me about it later.",
    cannot_do=(
        f"{OWN_MARKS[0]} I cannot teach or write: I only remember what you tell me and quote it when you ask. "
        "For a real model set OPENAI_API_KEY."
    ),
    noted=("Noted: ", "I will remember: ", "Understood: "),
    listening=f"{OWN_MARKS[0]} I am listening. Tell me something about yourself, and ask me about it later.",
    small_talk=(
        f"{OWN_MARKS[0]} Hello. Tell me something about yourself, and ask me about it later.",
        f"{OWN_MARKS[0]} You are welcome.",
    ),
    quote=_english_quote,
)
CHINESE = Phrases(
    mark=OWN_MARKS[1],
    said={"user": "你之前說過：", "assistant": "助理之前說過："},
    said_on={"user": "你在 {day} 說過：", "assistant": "助理在 {day} 說過："},
    from_summary="根據先前對話的摘要，",
    between="",
    nothing_found=(
        f"{OWN_MARKS[1]}我的上下文（摘要與最近的訊息）裡沒有這方面的內容，而我只能引用其中說過的話。"
        "想得到真正的回答，請設定 OPENAI_API_KEY。"
    ),
    nothing_yet=f"{OWN_MARKS[1]}我還不知道關於你的事。先告訴我一件事，之後再問我看看。",
    cannot_do=(
        f"{OWN_MARKS[1]}我不會教學或寫作，只會記住你說過的事，並在你問起時引用。想用真正的模型，請設定 OPENAI_API_KEY。"
    ),
    noted=("記下了：", "我會記得：", "收到："),
    listening=f"{OWN_MARKS[1]}我在聽。告訴我一件關於你的事，之後再問我看看。",
    small_talk=(
        f"{OWN_MARKS[1]}你好。告訴我一件關於你的事，之後再問我看看。",
        f"{OWN_MARKS[1]}不客氣。",
    ),
    quote=_chinese_quote,
)
