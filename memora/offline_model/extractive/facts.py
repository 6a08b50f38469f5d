"""The vocabulary of facts: the words by which a sentence is known to be worth keeping, or known not to be.

Tables and nothing else; who adds up what they say is `pieces`. Expects comparable text (see `characters`), so Chinese
is written in Simplified, and commas, question marks and apostrophes are the narrow straight ones.
"""

from __future__ import annotations

from typing import Final

from memora.offline_model.extractive.cues import Cue

FIRST_PERSON = Cue(r"\b(?:i|i'm|i've|i'll|i'd|my|mine|we|our)\b", "[我咱俺]")
QUESTION = Cue(r"[?][”」』)\"']*;?$", "[吗呢][。.]?$")
CORRECTION = Cue(
    r"\b(?:(?:actually|instead|no longer|not any ?more|anymore|changed|moved|renamed|rescheduled|postponed|switched|"
    r"correction|i meant|turns out|cancell?ed|rather than)\b|^(?:no|oops|wait|sorry), )",
    "其实|改到|改成|改为|改名|改在|更正|说错|讲错|记错|应该是.{1,12}才对|不再|换成|换到|搬到|搬去|延到|延后|提前到|取消|不是.{1,12}而?是|"
    "^(?:不对|抱歉),",
)
CALL_ME: Final = r"\bcall me\b(?! (?:later|back|when|at|on|if|in|tomorrow|tonight)\b)"
MY_NAME_IS_HAN: Final = "我叫(?![了他她它车外])"
I_AM_NAME = Cue(r"\b(?:I'm|I am) [A-Z][a-z]+", is_case_sensitive=True)

# Values: what one sentence has and another of the same topic has not.
DATE_VALUE = Cue(
    r"\b(?:january|february|march|april|june|july|august|september|october|november|december|(?:mon|tues|wednes|thurs|"
    r"fri|satur|sun)day|tomorrow|tonight|yesterday|next (?:week|month|year)|last (?:week|month|year)|in may)\b",
    "[0-9一二三四五六七八九十]+ ?(?:月|日|号|点|年)|(?:下|上|这)个?(?:月|周|星期|礼拜)|明天|昨天|后天|"
    "明年|去年|周[一二三四五六日末]|星期[一二三四五六日]",
)
NUMBER_VALUE = Cue(r"\d", is_case_sensitive=True)
TITLE_VALUE = Cue(
    r"\"[^\"]{2,60}\"", "《[^》]{1,40}》|“[^”]{2,60}”|「[^」]{2,40}」|『[^』]{2,40}』", is_case_sensitive=True
)
_NAME: Final = r"(?<=[\w,:;'(] )(?!I\b)[A-Z][\w-]+|\b[A-Z]{2,}[\w-]*\b"
NAME_VALUE = Cue(_NAME, is_case_sensitive=True)
_CALLED: Final = (r"\b(?:named?|called|name is)\b", "[叫姓]|名字|改名")
CALLED_VALUE = Cue(*_CALLED)
CALLED_OR_NAME_VALUE = Cue("|".join([*_CALLED, _NAME]), is_case_sensitive=True)

VALUE_CUES: Final = ((0.5, DATE_VALUE), (0.3, NUMBER_VALUE), (0.9, TITLE_VALUE), (0.3, CALLED_VALUE))
NAME_WORTH: Final = 0.3
NAMES_COUNTED: Final = 3

# (what it is worth, when). Several may apply; each applies once.
USER_CUES: Final = (
    (0.6, FIRST_PERSON),
    (0.6, Cue(r"\b(?:the )?user(?:'s)?\b", "使用者|用户")),
    (
        1.2,
        Cue(
            rf"\b(?:my name|{CALL_ME}|i am called|i'm from|i am from|i live|i work|i study|i was born|my job|"
            r"my birthday|years old|allergic|my (?:wife|husband|son|daughter|mother|father|mom|dad|sister|brother|boss|"
            r"teacher|friend|cat|dog|company|team))\b",
            f"{MY_NAME_IS_HAN}|叫我|我姓|我是|我住|我来自|我的名字|我.{{0,4}}(?:工作|上班)|生日|过敏|"
            "我.{0,2}(?:太太|先生|老公|老婆|妈|爸|姐|妹|哥|弟|儿子|女儿|朋友|老板|老师|猫|狗)",
        ),
    ),
    (
        0.7,
        Cue(
            r"\b(?:i (?:really |also |always |still )*(?:like|love|enjoy|prefer|hate|dislike)|favou?rite|fan of|"
            r"interested in|can't eat|don't eat|don't like|vegetarian|hobb(?:y|ies))\b",
            "喜欢|最爱|热爱|爱吃|爱喝|偏好|讨厌|不吃|不喝|兴趣|爱好|嗜好|擅长",
        ),
    ),
    (
        0.8,
        Cue(
            r"\b(?:i(?:'m| am) (?:going to|planning|preparing)|plan(?:s|ning)? to|want to|need to|have to|must|goal|"
            r"decided?|appointment|exam|deadline|interview|hope to|would like to|i'd like to)\b",
            "我.{0,6}(?:想要|要|打算|决定|准备|希望|计划|计画|预定|预约)|目标|考试|面试|截止",
        ),
    ),
    (
        0.8,
        Cue(
            r"\bi(?:'ve| have)? (?:just |recently |also |even )?(?:went|saw|read|bought|watched|met|visited|finished|"
            r"started|learned|joined|got|lost|broke|made|took|tried|found|had|came|attended|encountered|been)\b",
            "我.{0,10}[了过]|我.{0,6}(?:在看|在读|在学|正在|最近)|遇到",
        ),
    ),
    (1.0, I_AM_NAME),
    (0.9, CORRECTION),
    (
        0.7,
        Cue(
            r"\b(?:^please|from now on|always answer|never|do not|don't forget|remember that)\b",
            "^请|从现在|以后|不要|别再|一律|记住",
        ),
    ),
)
ASSISTANT_CUES: Final = (
    (0.7, Cue(r"\b(?:recommend(?:ed)?|suggest(?:ed)?|called|we agreed|i will remind|you (?:said|told|mentioned))\b")),
    (0.7, Cue("推荐|建议你|叫做|称为|我们说好|你(?:说|提)过")),
)

# (what it takes off, when).
COSTS: Final = (
    (1.6, QUESTION),
    (
        1.0,  # small talk
        Cue(
            r"\b(?:as an ai|ai (?:companion|assistant)|let me know|feel free|you(?:'re| are) welcome|looking forward|"
            r"nice to meet|happy to help|glad to|sorry to hear|i(?:'ll| will) (?:try|check|take a look|"
            r"keep that in mind|consider)|talk (?:to you )?later|next time|good luck|thank(?:s| you))\b|"
            r"that(?:'s| is| sounds) (?:a )?(?:great|good)",
            "作为一个|ai(?:伴侣|助手)|随时|不客气|很高兴|希望你|祝你|"
            "听起来|加油|谢谢|下次再|我会(?:试|去看|考虑|注意|努力)|时间不早|晚安|再见",
        ),
    ),
    (
        1.0,  # what was asked of the assistant is done once it is answered; it is no fact about the user
        Cue(
            r"^(?:please )?(?:(?:can|could|would) you )?(?:teach|explain|translate|write|give|show|help|recommend|"
            r"suggest|list)\b",
            "^(?:请)?你?(?:可以|能)?(?:教我|解释|翻译|写|给我|帮我|推荐|列出|造句|介绍)",
        ),
    ),
    (2.0, Cue(r"[^\s\u3040-\u30ff\u3400-\u9fff]{45}", is_case_sensitive=True)),  # a key, an address, noise
)
GREETING = Cue(
    r"^(?:hi|hello|hey|thanks?|thank you|ok(?:ay)?|sure|all ?right|great|good (?:morning|night|evening|afternoon)|"
    r"bye|goodbye|see you|you're welcome|no problem|of course|got it|i see|nice to meet you|sounds? (?:good|great))\b",
    "^(?:你好|您好|嗨|哈喽|谢谢|多谢|好的|好啊|好呀|没问题|不客气|再见|拜拜|晚安|早安|早上好|下次见|了解|明白|收到|当然|是的|嗯)",
)
