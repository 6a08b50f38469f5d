"""The language half of the offline model: it keeps, drops, finds and quotes sentences, in English and Chinese.

It owns what is worth remembering, how a summary is laid out in one line, and how an answer is worded. It must not
invent a word about the user: everything it says about earlier talk is a quotation. No clock, no randomness, no
state beside its arguments; the time it takes grows with the length of the text and no faster.

The summary text is the only memory. It is a row of sealed sentences, oldest first, each verbatim, so that reading it
back gives exactly the sentences that were written. `[2023-05-01]` stands before the first sentence of a day, and a
sentence of the assistant is marked as such; an unmarked one is the user's.
"""

from __future__ import annotations

import heapq
import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

OWN_MARKS = ("(offline model)", "（離線模型）")
"""How every reply of `answer` begins, English and Chinese: what is marked so is never folded back as a fact."""


@dataclass(frozen=True)
class Utterance:
    """One message as the model sees it; `role` is "user" or "assistant"."""

    role: str
    content: str


# --------------------------------------------------------------------------------------------------------------
# Characters

# Pairs at the same place: what people write in Traditional and in Simplified is compared as Simplified.
_TRADITIONAL = (
    "並乾亂亞佈佔併來侶係俠倉個們倫偉偵傘備傢傳傷傾僅價儀儘優儲兒內兩冊凍別刪則剛剝創劃劇劉劑勁動務勝勞勢勵勸勻匯"
    "區協卻厭厲參員唸問啟喪喫喬單喲嗎嘍嘗嘩噹嚇嚐嚴囑國圍園圓圖團執堅報場塊墳墾壇壓壞壯壽夠夢夾奧奪奮娛婦媽嫻孫學"
    "宮實寧寫寬寵寶將專尋對導屆層屬島嶺嶼嶽巖師帶幫幹幾廁廈廚廟廠廢廣廳張強彈彎後從復徹恆悅悶惡惱愛態慘慣慮慳慶慾"
    "憂憊憐憶應懲懶懷懸懼戀戇戰戲戶捱掃揀換揮搖撈擁擇擊擋擔據擬擴擺攜攝攢敗敵數斬斷於時晝暢暫曉曬書會東條棟業極榮"
    "構槍樂樑樓標樣樹橋機橫檔檢櫃櫻權歐歡歲歷歸殘殺殼氣決沒況涼淨淺減測湊湯準溝溫溼滅滯滾滿漁漢漲漸潔潛澤澱濃濕濟"
    "濱灘灣災為烏無煉煙煩熱燈燉燒燙營燭爐爛爭爲爺爾牆狀獎獨獲獻現瑣瑪環產畢畫異當療發盡監盤盧眾確碼礎礙礦禮禱稅種"
    "稱穌積穩穫窮窺競筆箏節範築簡簫簽簾籃籌籤粵糧紀約紅納紐紙級紮細紹終絃組結絡給統絲經綜綠綢維網綿緊緒線編緩練緻"
    "縣縫縮縱總績織繪繫繼續纔罰羅義習聖聞聯聰聲職聽脈脫腦腳腸膽臨臺與興舉舊艱莊華菸萬葉蓋蔔蔥薑薦薩藍藝藥蘆蘇蘭蘿"
    "處號虧蝦蟲蠅衆術衛衝裏補裝裡製複褲褸襯見規視親覺覽觀觸訂計訊討訓記訪設許訴診註証評詞詠詢試詩話該詳誇誌認誒誕"
    "語誤說説誰課誼調談請論諗諦諮諾謂謙講謝謹證識譜譯議護譽讀變讓讕讚豐豬貓貝負財貢貧貨責貴買費貼資賈賓賞賠賢賣賦"
    "質賬賺購賽贈贊贏贖趕跡踐蹟車軌軍軟較載輔輕輛輩輪輯輸轉辦辭農這連週進遊運過達遜遞遠適遲遷選遺還邊邏郵鄉鄧鄭鄰"
    "醃醜醫醬釋針釣鈴銀鋪鋼錄錢錯錶鍊鍋鍛鍵鍾鎔鎖鎮鐘鐵鑑鑰鑽長門閂開閒間閱闆闊關陣陳陸陽隊階際隨險隸隻雖雙雜雞離"
    "難雲電霧靈靚靜韌韻響頁頂項順須預頓領頤頭顆題顏願類顧顯風飛飪飯飲飾餃餅養餘餚館饋馬馳駕駭騎騙驅驗驚髒體鬆鬍鬥"
    "鬧鬱魚鮓鮮鯨鱸鳥鳳鴨鵝鹹鹽麗麥麪麵麼麽黃點黨齊齒齡齣龍"
)
_SIMPLIFIED = (
    "并干乱亚布占并来侣系侠仓个们伦伟侦伞备家传伤倾仅价仪尽优储儿内两册冻别删则刚剥创划剧刘剂劲动务胜劳势励劝匀汇"
    "区协却厌厉参员念问启丧吃乔单哟吗喽尝哗当吓尝严嘱国围园圆图团执坚报场块坟垦坛压坏壮寿够梦夹奥夺奋娱妇妈娴孙学"
    "宫实宁写宽宠宝将专寻对导届层属岛岭屿岳岩师带帮干几厕厦厨庙厂废广厅张强弹弯后从复彻恒悦闷恶恼爱态惨惯虑悭庆欲"
    "忧惫怜忆应惩懒怀悬惧恋戆战戏户挨扫拣换挥摇捞拥择击挡担据拟扩摆携摄攒败敌数斩断于时昼畅暂晓晒书会东条栋业极荣"
    "构枪乐梁楼标样树桥机横档检柜樱权欧欢岁历归残杀壳气决没况凉净浅减测凑汤准沟温湿灭滞滚满渔汉涨渐洁潜泽淀浓湿济"
    "滨滩湾灾为乌无炼烟烦热灯炖烧烫营烛炉烂争为爷尔墙状奖独获献现琐玛环产毕画异当疗发尽监盘卢众确码础碍矿礼祷税种"
    "称稣积稳获穷窥竞笔筝节范筑简箫签帘篮筹签粤粮纪约红纳纽纸级扎细绍终弦组结络给统丝经综绿绸维网绵紧绪线编缓练致"
    "县缝缩纵总绩织绘系继续才罚罗义习圣闻联聪声职听脉脱脑脚肠胆临台与兴举旧艰庄华烟万叶盖卜葱姜荐萨蓝艺药芦苏兰萝"
    "处号亏虾虫蝇众术卫冲里补装里制复裤褛衬见规视亲觉览观触订计讯讨训记访设许诉诊注证评词咏询试诗话该详夸志认诶诞"
    "语误说说谁课谊调谈请论谂谛咨诺谓谦讲谢谨证识谱译议护誉读变让谰赞丰猪猫贝负财贡贫货责贵买费贴资贾宾赏赔贤卖赋"
    "质账赚购赛赠赞赢赎赶迹践迹车轨军软较载辅轻辆辈轮辑输转办辞农这连周进游运过达逊递远适迟迁选遗还边逻邮乡邓郑邻"
    "腌丑医酱释针钓铃银铺钢录钱错表炼锅锻键钟镕锁镇钟铁鉴钥钻长门闩开闲间阅板阔关阵陈陆阳队阶际随险隶只虽双杂鸡离"
    "难云电雾灵靓静韧韵响页顶项顺须预顿领颐头颗题颜愿类顾显风飞饪饭饮饰饺饼养余肴馆馈马驰驾骇骑骗驱验惊脏体松胡斗"
    "闹郁鱼鲊鲜鲸鲈鸟凤鸭鹅咸盐丽麦面面么么黄点党齐齿龄出龙"
)

_TO_SIMPLIFIED = str.maketrans(_TRADITIONAL + "’", _SIMPLIFIED + "'")

# Control characters and lone surrogates cannot be stored or shown; line breaks are left for `splitlines`.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0e-\x1b\x1f\x7f\ud800-\udfff]")

_HAN = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
_HAN_OR_KANA = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD_OR_HAN_RUN = re.compile(rf"[{_HAN_OR_KANA}]+|[^\W_{_HAN_OR_KANA}]+(?:['’-][^\W_{_HAN_OR_KANA}]+)*")
_SPEAKS = re.compile(r"[^\W_]")


def _comparable(text: str) -> str:
    """The text as it is compared: letters narrow, apostrophes straight, Traditional as Simplified; case is kept."""
    return unicodedata.normalize("NFKC", text).translate(_TO_SIMPLIFIED)


# --------------------------------------------------------------------------------------------------------------
# Sentences

_WIDE_STOPS = "。！？；"
_STOPS = _WIDE_STOPS + ".!?;"
_CLOSERS = "”’」』）)]\"'"
_SENTENCE_END = re.compile(rf"[{_STOPS}]+[{re.escape(_CLOSERS)}]*")
_TITLE_BEFORE_DOT = re.compile(r"(?:^|[\s(\"'])(?:mr|mrs|ms|dr|prof|st|vs|no|e\.g|i\.e|[a-hj-z])$", re.IGNORECASE)
_ABBREVIATION_BEFORE_DOT = re.compile(r"(?:^|[\s\d(])(?:a\.m|p\.m|etc|inc|ltd|co|jr|sr)$", re.IGNORECASE)
_NUMBERING = re.compile(r"\s*\d{1,3}$")
_LOOK_BACK_CHARS = 6

# A longer sentence is cut at a comma or a space, so that one breathless message can be kept in part.
_MAX_SENTENCE_CHARS = 240
_MAX_HAN_SENTENCE_CHARS = 120
_SEAL_CHARS = 8  # what sealing may add; a sealed part must not count as too long when it is read back
_CLAUSE_END = re.compile(r"[，,、:：]")


def _sentences(text: str) -> Iterator[str]:
    """The sentences of a text, unsealed, none much longer than the longest allowed."""
    for line in _UNPRINTABLE.sub(" ", text).splitlines():
        start = 0
        for stop in _SENTENCE_END.finditer(line):
            if _ends_sentence(line, start, stop):
                yield from _bounded(line[start : stop.end()])
                start = stop.end()
        yield from _bounded(line[start:])


def _ends_sentence(line: str, start: int, stop: re.Match[str]) -> bool:
    mark = stop.group()
    if any(char in _WIDE_STOPS for char in mark):
        return True
    after = line[stop.end() : stop.end() + 2]
    if after and not after[0].isspace():
        return mark[0] in "!?" and _HAN.match(after) is not None
    if mark != ".":
        return True
    before = line[max(start, stop.start() - _LOOK_BACK_CHARS) : stop.start()]
    if _TITLE_BEFORE_DOT.search(before) or (stop.start() - start <= 4 and _NUMBERING.match(before)):
        return False
    return not (after[1:].islower() and _ABBREVIATION_BEFORE_DOT.search(before))


def _bounded(sentence: str) -> Iterator[str]:
    sentence = " ".join(sentence.split())
    limit = _MAX_HAN_SENTENCE_CHARS if _HAN.search(sentence) else _MAX_SENTENCE_CHARS
    start = 0
    while len(sentence) - start > limit + _SEAL_CHARS:
        end = start + _cut_at(sentence[start : start + limit])
        yield sentence[start:end]
        start = end
    yield sentence[start:]


def _cut_at(part: str) -> int:
    half = len(part) // 2
    clause_ends = [match.end() for match in _CLAUSE_END.finditer(part, half)]
    if clause_ends:
        return clause_ends[-1]
    space = part.rfind(" ", half)
    if space > 0:
        return space
    end = len(part)
    while end > half and (unicodedata.combining(part[end - 1]) or part[end - 1] in "\u200d\ufe0f"):
        end -= 1
    return end


def _sealed(sentence: str) -> str:
    """The sentence closed by a stop that stays a stop whatever follows; empty if it says nothing."""
    sentence = " ".join(sentence.split()).rstrip(" ,，、:：-")
    if not _SPEAKS.search(sentence):
        return ""
    stops = list(_SENTENCE_END.finditer(sentence, max(0, len(sentence) - _SEAL_CHARS)))
    stop = stops[-1] if stops else None
    if stop is None or stop.end() != len(sentence):
        return sentence + ("。" if _HAN.search(sentence) else ".")
    return sentence + ";" if _is_soft(sentence, stop) else sentence


def _is_soft(sentence: str, stop: re.Match[str]) -> bool:
    before = sentence[max(0, stop.start() - _LOOK_BACK_CHARS) : stop.start()]
    is_numbering = stop.start() <= 4 and _NUMBERING.match(before)
    patterns = (_TITLE_BEFORE_DOT, _ABBREVIATION_BEFORE_DOT)
    return stop.group() == "." and bool(is_numbering or any(pattern.search(before) for pattern in patterns))


# --------------------------------------------------------------------------------------------------------------
# Terms: what two sentences are compared by

_STOP_WORDS = frozenset(
    [
        "a",
        "an",
        "the",
        "and",
        "or",
        "but",
        "if",
        "so",
        "to",
        "of",
        "in",
        "on",
        "at",
        "for",
        "with",
        "from",
        "by",
        "as",
        "is",
        "are",
        "was",
        "were",
        "be",
        "been",
        "am",
        "i",
        "i'm",
        "i've",
        "i'll",
        "i'd",
        "you",
        "you're",
        "your",
        "me",
        "my",
        "we",
        "it",
        "it's",
        "its",
        "this",
        "that",
        "these",
        "those",
        "do",
        "does",
        "did",
        "have",
        "has",
        "had",
        "will",
        "would",
        "can",
        "could",
        "should",
        "not",
        "no",
        "yes",
        "ok",
        "okay",
        "thanks",
        "thank",
        "please",
        "just",
        "also",
        "really",
        "very",
        "what",
        "which",
        "who",
        "whom",
        "whose",
        "when",
        "where",
        "how",
        "why",
        "there",
        "here",
        "he",
        "she",
        "they",
        "him",
        "his",
        "her",
        "hers",
        "their",
        "them",
        "our",
        "us",
        "mine",
        "yours",
        "about",
        "any",
        "some",
        "been",
        "being",
        "than",
        "then",
        "too",
        "up",
        "out",
        "into",
        "tell",
        "told",
        "remember",
        "mentioned",
        "mention",
        "said",
        "say",
        "talked",
        "talk",
        "earlier",
        "before",
        "ago",
        "previously",
        "again",
        "know",
        "don't",
        "didn't",
        "what's",
        "user",
        "assistant",
    ]
)
_FUNCTION_HAN = "的了是我你您妳他她它们吗呢啊吧也都很就和与在不这那个么什会着过把被让给对吧呀哦啦嗯哪谁几"
_ASKING_HAN = re.compile(
    "什么时候|什么|甚么|怎么样|怎么|为什么|哪里|哪些|哪个|哪|谁|多少|是不是|有没有|还记得|记不记得|记得|曾经|之前|以前|刚才|告诉|"
    "提到|提过|说过|讲过|聊过|请问|知道|可以|觉得"
)
_SUFFIXES = ("ings", "ing", "ied", "ies", "ed", "es", "s", "e", "y")


def _stem(word: str) -> str:
    word = word.removesuffix("'s").removesuffix("’s")
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word[: -len(suffix)]
            break
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word


def _terms(comparable: str) -> frozenset[str]:
    """Word stems and pairs of neighbouring Han characters, without the words that carry nothing."""
    found: set[str] = set()
    for match in _WORD_OR_HAN_RUN.finditer(_ASKING_HAN.sub(" ", comparable.casefold())):
        run = match.group()
        if _HAN.match(run):
            found.update(_han_pairs(run))
        elif run not in _STOP_WORDS and (len(run) > 1 or run.isdigit()):
            found.add(_stem(run))
    return frozenset(found)


def _han_pairs(run: str) -> Iterator[str]:
    for first, second in pairwise(run):
        if first not in _FUNCTION_HAN and second not in _FUNCTION_HAN:
            yield first + second
    if len(run) == 1 and run not in _FUNCTION_HAN:
        yield run


# --------------------------------------------------------------------------------------------------------------
# Cues: what makes a sentence worth keeping. Chinese cues are written in Simplified, see `_comparable`.


def _cue(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


_FIRST_PERSON = _cue(r"\b(?:i|i'm|i've|i'll|i'd|my|mine|we|our)\b|[我咱俺]")
_THE_USER = _cue(r"\b(?:the )?user(?:'s)?\b|使用者|用户")
_QUESTION = re.compile(r"[?？][”’」』）)\"']*;?$|[吗呢][。.]?$")

_CORRECTION = _cue(
    r"\b(?:actually|instead|no longer|not any ?more|anymore|changed|moved|renamed|rescheduled|postponed|switched|"
    r"correction|i meant|turns out|cancell?ed|rather than)\b|^(?:no|oops|wait|sorry), |"
    r"其实|改到|改成|改为|改名|改在|更正|说错|讲错|记错|应该是才对|不再|换成|换到|搬到|搬去|延到|延后|提前到|取消|不是.{1,12}而?是|^(?:不对|抱歉)[，,]"
)

_CALL_ME = r"\bcall me\b(?! (?:later|back|when|at|on|if|in|tomorrow|tonight)\b)"
_WO_JIAO = "我叫(?![了他她它车外])"
_I_AM_NAME = re.compile(r"\b(?:I'm|I am) [A-Z][a-z]+")

# (what it is worth, when). Several may apply; each applies once.
_USER_CUES = (
    (0.6, _FIRST_PERSON),
    (0.6, _THE_USER),
    (
        1.2,
        _cue(
            rf"\b(?:my name|{_CALL_ME}|i am called|i'm from|i am from|i live|i work|i study|i was born|my job|"
            r"my birthday|"
            r"years old|allergic|my (?:wife|husband|son|daughter|mother|father|mom|dad|sister|brother|boss|teacher|"
            r"friend|cat|dog|company|team))\b|{_WO_JIAO}|叫我|我姓|我是|我住|我来自|我的名字|我.{0,4}(?:工作|上班)|生日|过敏|"
            r"我.{0,2}(?:太太|先生|老公|老婆|妈|爸|姐|妹|哥|弟|儿子|女儿|朋友|老板|老师|猫|狗)"
        ),
    ),
    (
        0.7,
        _cue(
            r"\b(?:i (?:really |also |always |still )*(?:like|love|enjoy|prefer|hate|dislike)|favou?rite|fan of|"
            r"interested in|can't eat|don't eat|don't like|vegetarian|hobb(?:y|ies))\b|"
            r"喜欢|最爱|热爱|爱吃|爱喝|偏好|讨厌|不吃|不喝|兴趣|爱好|嗜好|擅长"
        ),
    ),
    (
        0.8,
        _cue(
            r"\b(?:i(?:'m| am) (?:going to|planning|preparing)|plan(?:s|ning)? to|want to|need to|have to|must|goal|"
            r"decided?|appointment|exam|deadline|interview|hope to|would like to|i'd like to)\b|"
            r"我.{0,6}(?:想要|要|打算|决定|准备|希望|计划|计画|预定|预约)|目标|考试|面试|截止"
        ),
    ),
    (
        0.8,
        _cue(
            r"\bi(?:'ve| have)? (?:just |recently |also |even )?(?:went|saw|read|bought|watched|met|visited|finished|"
            r"started|learned|joined|got|lost|broke|made|took|tried|found|had|came|attended|encountered|been)\b|"
            r"我.{0,10}[了过]|我.{0,6}(?:在看|在读|在学|正在|最近)|遇到"
        ),
    ),
    (1.0, _I_AM_NAME),
    (0.9, _CORRECTION),
    (
        0.7,
        _cue(
            r"^please\b|\b(?:from now on|always answer|never|do not|don't forget|remember that)\b|"
            r"^请|从现在|以后|不要|别再|一律|记住"
        ),
    ),
)
_ASSISTANT_CUES = (
    (0.7, _cue(r"\b(?:recommend(?:ed)?|suggest(?:ed)?|called|we agreed|i will remind|you (?:said|told|mentioned))\b")),
    (0.7, _cue(r"推荐|建议你|叫做|称为|我们说好|你(?:说|提)过")),
)

_DATE_VALUE = _cue(
    r"\b(?:january|february|march|april|june|july|august|september|october|november|december|(?:mon|tues|wednes|thurs|"
    r"fri|satur|sun)day|tomorrow|tonight|yesterday|next (?:week|month|year)|last (?:week|month|year))\b|\bin may\b|"
    r"[0-9一二三四五六七八九十]+ ?(?:月|日|号|点|年)|(?:下|上|这)个?(?:月|周|星期|礼拜)|明天|昨天|后天|"
    r"明年|去年|周[一二三四五六日末]|星期[一二三四五六日]"
)
_NUMBER_VALUE = re.compile(r"\d")
_TITLE_VALUE = re.compile(r"《[^》]{1,40}》|“[^”]{2,60}”|\"[^\"]{2,60}\"|「[^」]{2,40}」|『[^』]{2,40}』")
_NAME_VALUE = re.compile(r"(?<=[\w,:;'’(] )(?!I\b)[A-Z][\w-]+|\b[A-Z]{2,}[\w-]*\b")
_CALLED_VALUE = _cue(r"\b(?:named?|called|name is)\b|[叫姓]|名字|改名")
_VALUES = (
    (0.5, _DATE_VALUE),
    (0.3, _NUMBER_VALUE),
    (0.9, _TITLE_VALUE),
    (0.3, _CALLED_VALUE),
)
_NAME_WORTH = 0.3
_NAMES_COUNTED = 3

_GREETING = _cue(
    r"^(?:(?:hi|hello|hey|thanks?|thank you|ok(?:ay)?|sure|all ?right|great|good (?:morning|night|evening|afternoon)|"
    r"bye|goodbye|see you|you're welcome|no problem|of course|got it|i see|nice to meet you|sounds? (?:good|great))\b|"
    r"你好|您好|嗨|哈喽|谢谢|多谢|好的|好啊|好呀|没问题|不客气|再见|拜拜|晚安|早安|早上好|下次见|了解|明白|收到|当然|是的|嗯)"
)
_SMALL_TALK = _cue(
    r"\b(?:as an ai|ai (?:companion|assistant)|let me know|feel free|you(?:'re| are) welcome|looking forward|"
    r"nice to meet|happy to help|glad to|sorry to hear|i(?:'ll| will) (?:try|check|take a look|keep that in mind|"
    r"consider)|talk (?:to you )?later|next time|good luck|thank(?:s| you))\b|"
    r"that(?:'s| is| sounds) (?:a )?(?:great|good)|"
    r"作为一个|ai(?:伴侣|助手)|随时|不客气|很高兴|希望你|祝你|"
    r"听起来|加油|谢谢|下次再|我会(?:试|去看|考虑|注意|努力)|时间不早|晚安|再见"
)
_GREETING_CHARS = 30
_ORDER = _cue(
    r"^(?:please )?(?:(?:can|could|would) you )?(?:teach|explain|translate|write|give|show|help|recommend|suggest|"
    r"list)\b|^(?:请)?你?(?:可以|能)?(?:教我|解释|翻译|写|给我|帮我|推荐|列出|造句|介绍)"
)

_USER_BASE = 1.0
_QUESTION_COST = 1.6
_SMALL_TALK_COST = 1.0
_ORDER_COST = 1.0  # what was asked of the assistant is done; it is no fact about the user
_GREETING_COST = 1.5
_TINY_COST = 1.0
_TINY_WIDTH = 10
_BLOB_COST = 2.0
_BLOB = re.compile(r"[^\s\u3040-\u30ff\u3400-\u9fff]{45}")
_COSTS = (
    (_QUESTION_COST, _QUESTION),
    (_SMALL_TALK_COST, _SMALL_TALK),
    (_ORDER_COST, _ORDER),
    (_BLOB_COST, _BLOB),
)
_WORTH_KEEPING = 1.3


def _weigh(comparable: str, role: str) -> float:
    """What a sentence is worth by itself; the same text always weighs the same."""
    is_assistant = role == "assistant"
    worth = 0.0 if is_assistant else _USER_BASE
    worth += sum(value for value, cue in (_ASSISTANT_CUES if is_assistant else _USER_CUES) if cue.search(comparable))
    worth += sum(value for value, cue in _VALUES if cue.search(comparable))
    worth += _NAME_WORTH * min(_NAMES_COUNTED, len(_NAME_VALUE.findall(comparable)))
    return worth - _deductions(comparable)


def _deductions(comparable: str) -> float:
    cost = sum(cost for cost, cue in _COSTS if cue.search(comparable))
    if len(comparable) <= _GREETING_CHARS and _GREETING.search(comparable):
        cost += _GREETING_COST
    if len(comparable) + len(_HAN.findall(comparable)) < _TINY_WIDTH:
        cost += _TINY_COST
    return cost


# --------------------------------------------------------------------------------------------------------------
# Pieces: a sentence with its speaker and its day

_DAY = re.compile(r"\[(\d{4}-\d{2}-\d{2})\]\s*")
_LABEL = re.compile(r"(Assistant: |助理：|User: |使用者：)")
_ASSISTANT_LABELS = ("Assistant: ", "助理：")
_USER_LABELS = ("User: ", "使用者：")
_BULLETS = re.compile(r"(?:[-*•>#]+\s+)+")
_OPENER = _cue(
    r"(?:hi|hello|hey|ok(?:ay)?|yes|yeah|well|sure|oh|wow|haha|by the way|thanks|thank you|alright)(?: there)?[,!]\s+|"
    r"(?:你好|您好|嗨|好的|是的|好啊|好吧|嗯|哇|哈哈|对了|对啊|谢谢|谢谢你|另外|还有|那么|那)[，,！!]\s*"
)


@dataclass(frozen=True)
class _Piece:
    """One sealed sentence. `is_kept` tells what was already in the summary from what is new."""

    text: str
    role: str
    day: str = ""
    is_kept: bool = False

    @cached_property
    def comparable(self) -> str:
        return _comparable(self.text)

    @cached_property
    def terms(self) -> frozenset[str]:
        return _terms(self.comparable)

    @cached_property
    def worth(self) -> float:
        return _weigh(self.comparable, self.role)

    @property
    def is_question(self) -> bool:
        return _QUESTION.search(self.comparable) is not None

    @property
    def rendered(self) -> str:
        is_chinese = _HAN.search(self.text) is not None
        if self.role == "assistant":
            return _ASSISTANT_LABELS[is_chinese] + self.text
        return _USER_LABELS[is_chinese] + self.text if _LABEL.match(self.text) else self.text


def _read_messages(messages: Iterable[Utterance], day: str) -> tuple[list[_Piece], str]:
    """The sentences of the messages, oldest first, and the day that the last of them belongs to."""
    pieces: list[_Piece] = []
    for message in messages:
        if message.role == "assistant" and is_own_reply(message.content):
            continue
        for marked in _sentences(message.content):
            sentence, day = _without_day(marked, day)
            text = _refined(sentence, message.role)
            if text:
                pieces.append(_Piece(text, message.role, day))
    return pieces, day


def _read_summary(summary: str) -> tuple[list[_Piece], str]:
    """The sentences of a summary, and the day that its end belongs to."""
    pieces: list[_Piece] = []
    day = ""
    for marked in _sentences(summary):
        sentence, day = _without_day(marked, day)
        label = _LABEL.match(sentence)
        text = _sealed(sentence[label.end() :] if label else sentence)
        role = "assistant" if label and label.group() in _ASSISTANT_LABELS else "user"
        if text and not (role == "assistant" and is_own_reply(text)):
            pieces.append(_Piece(text, role, day, is_kept=True))
    return pieces, day


def _without_day(sentence: str, day: str) -> tuple[str, str]:
    sentence = sentence.lstrip()
    while mark := _DAY.match(sentence):
        sentence, day = sentence[mark.end() :], mark.group(1)
    return sentence, day


def is_own_reply(text: str) -> bool:
    """Whether the text is something `answer` said."""
    return text.lstrip(" \t\r\n\"'「“").startswith(OWN_MARKS)


def _refined(sentence: str, role: str) -> str:
    """The sentence without opening pleasantries, and a user's question down to the statement it began with."""
    sentence = sentence.lstrip()
    while (opener := _OPENER.match(sentence)) or (opener := _BULLETS.match(sentence)):
        sentence = sentence[opener.end() :]
    sealed = _sealed(sentence)
    if role == "user" and _QUESTION.search(_comparable(sealed)):
        return _statement_before_question(sealed) or sealed
    return sealed


_CLAUSE_COMMA = re.compile(r"，|, ")
_INTERROGATIVE = _cue(
    r"^(?:and |but |so )?(?:do|does|did|is|are|can|could|would|will|what|which|who|when|where|how|why|any)\b|"
    r"什么|怎么|哪|谁|多少|[吗呢]$|^你|有没有|能不能|可不可以"
)
_CONDITIONAL = _cue(r"^(?:if|when|since|because|do|does|can|could|would|what|how|如果|要是|当|因为|你|请|可以|能)")


def _statement_before_question(question: str) -> str:
    """What the user says of themselves before asking: "I have an exam in May, how do I prepare?"; may be empty."""
    clauses = _CLAUSE_COMMA.split(question)[:-1]
    while clauses and _INTERROGATIVE.search(_comparable(clauses[-1].strip())):
        clauses.pop()
    if not clauses:
        return ""
    last = clauses[-1]
    statement = question[: question.index(last, sum(map(len, clauses[:-1]))) + len(last)]
    comparable = _comparable(statement)
    if _CONDITIONAL.match(comparable) or not _FIRST_PERSON.search(comparable):
        return ""
    return _sealed(statement)


# --------------------------------------------------------------------------------------------------------------
# Corrections: newer corrects older

_SLOTS = (
    ("name", _cue(rf"\bmy name is\b|{_CALL_ME}|我的名字|{_WO_JIAO}|叫我")),
    ("home", _cue(r"\bi(?: now)? live in\b|我(?:现在)?住")),
    ("birthday", _cue(r"\bmy birthday\b|我的?生日")),
    ("age", _cue(r"\byears old\b|\d ?岁")),
)
_OWN_THING = _cue(r"\bmy ((?:\w+ ){0,2}\w+) (?:is|are|was|has)\b|我(?:最喜欢)?的(\w{1,6}?)(?:是|叫|在)")
_KINDS = (
    ("day", _DATE_VALUE),
    ("number", _NUMBER_VALUE),
    ("title", _TITLE_VALUE),
    ("name", _CALLED_VALUE),
    ("name", _NAME_VALUE),
)
_LATEST_PER_TERM = 8


def _slot(comparable: str) -> str:
    """What a sentence settles, where a later sentence of the same slot would settle it anew; may be empty."""
    for slot, cue in _SLOTS:
        if cue.search(comparable):
            return slot
    own = _OWN_THING.search(comparable)
    return (own.group(1) or own.group(2)).casefold() if own else ""


def _kinds(comparable: str) -> frozenset[str]:
    return frozenset(kind for kind, cue in _KINDS if cue.search(comparable))


def _topic(comparable: str) -> frozenset[str]:
    """The terms of a sentence without its values: what it is about, not what it says of it."""
    for cue in (_CORRECTION, *(cue for _, cue in _KINDS)):
        comparable = cue.sub(" ", comparable)
    return _terms(comparable)


class _Corrections:
    """Which sentence revises which: `revised_by[older] = newer`; `superseded` say nothing the newer does not."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self.revised_by: dict[int, int] = {}
        self.superseded: set[int] = set()
        self._pieces = pieces
        self._by_term: dict[str, list[int]] = {}
        self._by_key: dict[str, int] = {}
        for index, piece in enumerate(pieces):
            if piece.role == "user" and not piece.is_question:
                self._see(index, piece)

    def _see(self, index: int, piece: _Piece) -> None:
        slot = _slot(piece.comparable)
        kinds = _kinds(piece.comparable)
        older = self._by_key.get(f"slot {slot}") if slot else None
        is_correction = _CORRECTION.search(piece.comparable) is not None
        if older is None and is_correction:
            older = self._corrected_by(piece, kinds)
        if older is not None:
            self.revised_by[older] = index
            if self._says_it_all(piece, self._pieces[older], is_correction=is_correction):
                self.superseded.add(older)
        self._by_key.update({f"kind {kind}": index for kind in kinds})
        if slot:
            self._by_key[f"slot {slot}"] = index
        for term in piece.terms:
            self._by_term.setdefault(term, []).append(index)

    def _corrected_by(self, piece: _Piece, kinds: frozenset[str]) -> int | None:
        shared = Counter(older for term in piece.terms for older in self._by_term.get(term, ())[-_LATEST_PER_TERM:])
        alike = [older for older in shared if shared[older] > 1 or kinds & _kinds(self._pieces[older].comparable)]
        if alike:
            return max(alike, key=lambda older: (shared[older], older))
        return max((self._by_key[key] for kind in kinds if (key := f"kind {kind}") in self._by_key), default=None)

    @staticmethod
    def _says_it_all(newer: _Piece, older: _Piece, *, is_correction: bool) -> bool:
        if not is_correction:
            return older.terms <= newer.terms
        topic = _topic(older.comparable)
        return bool(topic) and topic <= _topic(newer.comparable)

    def chain(self, index: int) -> list[int]:
        """The sentence after the ones that revise it, newest first."""
        chain = [index]
        while (newer := self.revised_by.get(chain[-1])) is not None:
            chain.append(newer)
        return chain[::-1]


# --------------------------------------------------------------------------------------------------------------
# Composing a summary


@dataclass(frozen=True)
class _Caps:
    max_words: int
    max_tokens: int
    count_words: Callable[[str], int]
    count_tokens: Callable[[str], int]

    def allow(self, text: str) -> bool:
        return self.count_words(text) <= self.max_words and self.count_tokens(text) <= self.max_tokens


_NOVELTY_SHARE = 0.35  # how much rare terms count beside the cues
_LENGTH_DAMPING = 0.5  # how much a long sentence has to be better to win over a short one
_MOST_CONSIDERED = 400
_REPEATS_SHARE = 0.6


def summarise(
    existing_summary: str,
    messages: Sequence[Utterance],
    *,
    max_words: int,
    max_tokens: int,
    count_tokens: Callable[[str], int],
    count_words: Callable[[str], int],
) -> str:
    """The existing summary with what is worth keeping of the messages (oldest first), one line, within both caps.

    Messages that say nothing leave the summary as it is; the result is empty where there is nothing to keep at all.
    """
    caps = _Caps(max_words, max_tokens, count_words, count_tokens)
    kept, known_day = _read_summary(existing_summary)
    fresh, day = _read_messages(messages, known_day)
    fresh = [piece for piece in _without_repeats(fresh) if piece.worth >= _WORTH_KEEPING]
    if not fresh and day == known_day:
        return _unchanged(existing_summary, kept, day, caps)
    return _compose([*kept, *fresh], day, caps)


def shorten(
    summary: str,
    *,
    max_words: int,
    max_tokens: int,
    count_tokens: Callable[[str], int],
    count_words: Callable[[str], int],
) -> str:
    """The best of a summary's sentences within both caps; unchanged where it already fits."""
    caps = _Caps(max_words, max_tokens, count_words, count_tokens)
    kept, day = _read_summary(summary)
    return _unchanged(summary, kept, day, caps)


def _unchanged(summary: str, kept: Sequence[_Piece], day: str, caps: _Caps) -> str:
    is_one_line = len(summary.splitlines()) <= 1 and not _UNPRINTABLE.search(summary)
    text = summary if is_one_line else _laid_out(kept, day)
    return text if caps.allow(text) else _compose(kept, day, caps)


def _compose(pieces: Sequence[_Piece], day: str, caps: _Caps) -> str:
    pieces = _most_promising(_without_repeats(pieces))
    text = _filled(pieces, day, caps)
    if not text and day:  # no room for days
        text = _filled([replace(piece, day="") for piece in pieces], "", caps)
    return text


def _without_repeats(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Each sentence once, at the place where it was said last: what was said again holds again."""
    latest = {(piece.role, piece.text.casefold()): index for index, piece in enumerate(pieces)}
    return [pieces[index] for index in sorted(latest.values())]


def _most_promising(pieces: Sequence[_Piece]) -> Sequence[_Piece]:
    """As many as are worth a closer look, so that one huge message costs no more than reading it."""
    if len(pieces) <= _MOST_CONSIDERED:
        return pieces
    values = _values(pieces)
    best = heapq.nlargest(_MOST_CONSIDERED, range(len(pieces)), key=lambda index: (values[index], index))
    return [pieces[index] for index in sorted(best)]


def _filled(pieces: Sequence[_Piece], day: str, caps: _Caps) -> str:
    corrections = _Corrections(pieces)
    filling = _Filling(pieces, day, caps)
    for index in _ranked(pieces, corrections):
        filling.add([member for member in corrections.chain(index) if member not in filling.chosen])
    chosen = list(filling.chosen)
    while chosen:
        text = _laid_out([pieces[index] for index in sorted(chosen)], day)
        if caps.allow(text):
            return text
        chosen.pop()
    return ""


def _ranked(pieces: Sequence[_Piece], corrections: _Corrections) -> list[int]:
    """The sentences from the most to the least worth keeping; of equals, the newer first."""
    worth = _values(pieces)
    for older in sorted(corrections.revised_by, reverse=True):
        worth[older] = max(worth[older], worth[corrections.revised_by[older]])
    candidates = [index for index in range(len(pieces)) if index not in corrections.superseded]
    return sorted(candidates, key=lambda index: (worth[index], index), reverse=True)


def _values(pieces: Sequence[_Piece]) -> list[float]:
    frequency = Counter(term for piece in pieces for term in piece.terms)
    rarity = {term: math.log(1 + len(pieces) / count) for term, count in frequency.items()}
    return [_value(piece, rarity) for piece in pieces]


def _value(piece: _Piece, rarity: dict[str, float]) -> float:
    novelty = sum(rarity[term] for term in sorted(piece.terms)) / math.sqrt(len(piece.terms) + 3)
    value = piece.worth + _NOVELTY_SHARE * novelty
    return value / _width(piece.text) ** _LENGTH_DAMPING if value > 0 else value


def _width(text: str) -> int:
    return len(text) + 2 * len(_HAN.findall(text)) + 10


class _Filling:
    """Sentences taken one after the other into what room there is; `chosen` keeps the order of taking."""

    def __init__(self, pieces: Sequence[_Piece], day: str, caps: _Caps) -> None:
        self.chosen: dict[int, frozenset[str]] = {}
        self._pieces = pieces
        self._caps = caps
        mark = _day_mark(day)
        self._days = {day}
        self._tokens = caps.max_tokens - caps.count_tokens(mark)
        self._words = caps.max_words - caps.count_words(mark)

    def add(self, group: Sequence[int]) -> None:
        """Take all of a group (a sentence and what revises it), or none."""
        if not group or self._repeats(group[-1]):
            return
        days = {self._pieces[index].day for index in group} - self._days
        text = "".join(_day_mark(day) for day in sorted(days))
        text += " ".join(self._pieces[index].rendered for index in group) + " "
        tokens, words = self._caps.count_tokens(text), self._caps.count_words(text)
        if tokens > self._tokens or words > self._words:
            return
        self._tokens -= tokens
        self._words -= words
        self._days |= days
        self.chosen.update({index: _specifics(self._pieces[index].comparable) for index in group})

    def _repeats(self, index: int) -> bool:
        piece = self._pieces[index]
        return any(self._is_said_by(piece, other) for other in self.chosen)

    def _is_said_by(self, piece: _Piece, other: int) -> bool:
        theirs = self._pieces[other].terms
        shared = len(piece.terms & theirs)
        if shared <= _REPEATS_SHARE * max(1, min(len(piece.terms), len(theirs))):
            return False
        return _specifics(piece.comparable) <= self.chosen[other]


def _specifics(comparable: str) -> frozenset[str]:
    """The numbers, names and days in a sentence: one that has others is no repetition."""
    return frozenset(
        match.group().casefold()
        for cue in (_NUMBERS, _NAME_VALUE, _DATE_VALUE, _TITLE_VALUE)
        for match in cue.finditer(comparable)
    )


_NUMBERS = re.compile(r"\d+")


def _day_mark(day: str) -> str:
    return f"[{day}] " if day else ""


def _laid_out(pieces: Sequence[_Piece], day: str) -> str:
    """The summary text: the pieces in their order, each new day marked, and the last day even if nothing is kept."""
    text, shown = "", ""
    for piece in pieces:
        mark = _day_mark(piece.day) if piece.day != shown else ""
        shown = piece.day or shown
        text = _joined(text, mark + piece.rendered)
    return text if day == shown else _joined(text, _day_mark(day).rstrip())


def _joined(text: str, addition: str) -> str:
    if not text or not addition:
        return text + addition
    is_tight = text[-1] in _WIDE_STOPS and addition[0] not in _CLOSERS + _STOPS
    return text + ("" if is_tight else " ") + addition


# --------------------------------------------------------------------------------------------------------------
# Answering

# Everyday words for one thing in both languages, so that a question need not use the words of the fact.
_CONCEPTS = (
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

# Whom or what a question is about: where no sentence speaks of it, sentences about others are no answer.
_SUBJECTS = frozenset(
    [
        "#cat",
        "#dog",
        "#mother",
        "#father",
        "#sister",
        "#brother",
        "#wife",
        "#husband",
        "#friend",
        "#birthday",
        "#allergy",
    ]
)
_PHRASED_CONCEPTS = (
    ("#name", _I_AM_NAME),
    ("#home", _cue(r"\bi(?:'m| am)\b.{0,30} from\b|\bi come from\b|\bam i from\b|\bdo i come from\b|我来自")),
)


def _concepts_by_word(column: int, separator: str) -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for row in _CONCEPTS:
        for word in row[column].split(separator):
            table[word] = (*table.get(word, ()), f"#{row[0]}")
    return table


_ENGLISH_CONCEPTS = _concepts_by_word(1, " ")
_CHINESE_CONCEPTS = _concepts_by_word(2, "|")
_CHINESE_CONCEPT = re.compile("|".join(sorted(_CHINESE_CONCEPTS, key=len, reverse=True)))
_ENGLISH_WORD = re.compile(r"[a-z]+")
_MONTHS = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
]
_MONTH = rf"({'|'.join(f'{month}|{month[:3]}' for month in _MONTHS)})"
_DAY_BEFORE_MONTH = re.compile(rf"\b(\d{{1,2}})(?:st|nd|rd|th)? (?:of )?{_MONTH}\b")
_DAY_AFTER_MONTH = re.compile(rf"\b{_MONTH}\.? (\d{{1,2}})(?:st|nd|rd|th)?\b")
_NUMERIC_DAY = re.compile(r"(?<!\d)(\d{1,2})(?:月|/|-)(\d{1,2})(?!\d)")


def _search_terms(comparable: str, day: str) -> frozenset[str]:
    """The terms of a sentence, single Han characters, everyday concepts (`#exam`) and calendar days (`@5-4`)."""
    lowered = comparable.casefold()
    days = {*_calendar_days(lowered), *_calendar_days(day)}
    lowered = _without_calendar_days(lowered) if days else lowered
    found = {*_terms(lowered), *days}
    found.update(char for char in _HAN.findall(_ASKING_HAN.sub(" ", lowered)) if char not in _FUNCTION_HAN)
    for word in _ENGLISH_WORD.findall(lowered):
        found.update(_ENGLISH_CONCEPTS.get(word, ()))
    for word in _CHINESE_CONCEPT.findall(lowered):
        found.update(_CHINESE_CONCEPTS[word])
    found.update(concept for concept, phrase in _PHRASED_CONCEPTS if phrase.search(comparable))
    return frozenset(found)


def _calendar_days(lowered: str) -> Iterator[str]:
    for month, day in _NUMERIC_DAY.findall(lowered):
        yield f"@{int(month)}-{int(day)}"
    for month, day in _DAY_AFTER_MONTH.findall(lowered):
        yield f"@{_month_number(month)}-{int(day)}"
    for day, month in _DAY_BEFORE_MONTH.findall(lowered):
        yield f"@{_month_number(month)}-{int(day)}"


def _without_calendar_days(comparable: str) -> str:
    for cue in (_NUMERIC_DAY, _DAY_AFTER_MONTH, _DAY_BEFORE_MONTH):
        comparable = cue.sub(" ", comparable)
    return comparable


def _month_number(name: str) -> int:
    return next(number for number, month in enumerate(_MONTHS, 1) if month.startswith(name))


_ABOUT_MEMORY = _cue(
    r"\b(?:i|i'm|me|my|mine|we|our|remember|earlier|did you|have you|"
    r"you (?:said|told|recommended|suggested|mentioned))\b|"
    r"[我咱俺]|记得|之前|刚才|曾经"
)
_ASKS = _cue(
    r"[?？][”’」』）)\"']*;?$|[吗呢][。.]?$|"
    r"(?:什么|甚么|哪|谁|多少|几(?!乎)|怎么|为什么|何时|还记得)[^。.!！]*$|"
    r"^(?:and |so |but )?(?:what|which|who|whose|when|where|why|how|do|does|did|is|are|was|were|am|have|has|can|could|"
    r"will|would)\b|\bremind me\b|\bdo you remember\b|\btell me (?:again )?(?:what|which|who|when|where|why|how|my)\b|"
    r"^(?:please )?(?:list|show|give|tell)(?: me)? (?:about )?my\b"
)
_REQUEST = _cue(
    r"^(?:(?:ok|okay|hi|hello|now|and|so|then|well)[,!. ]+)?(?:please[, ]+)?"
    r"(?:(?:can|could|would|will) you (?:please )?|i(?:'d like| want| need) you to |help me |let's )?"
    r"(?:teach|explain|translate|write|help|correct|recommend|suggest|make|create|define|check|practi[cs]e|describe|"
    r"compare|summari[sz]e|rewrite|fix|(?:give|show|list|tell)(?! (?:me )?(?:again )?(?:about )?"
    r"(?:my|me|what|which|who|when|where|why|how)\b))\b|"
    r"^(?:好的?[，,]?)?(?:请(?!问|记|叫|用|以|不|别|告|提醒)|你?(?:可不可以|能不能|可以|能)?(?:教我|教|解释|翻译|写|给我|帮我|推荐|"
    r"列出|列|举例|造句|介绍|说明|改写|修改|比较|示范|出题))"
)
_OVERVIEW = _cue(
    r"\bwhat (?:do|can) you (?:still )?(?:know|remember|recall)(?: about me)?[?.]?$|"
    r"\b(?:know|remember|recall|learned) (?:\w+ )?about me\b|\bwho am i\b|我是谁|"
    r"\bwhat (?:did|have) i (?:tell|told|said|say)(?: you)?(?: about (?:me|myself))?(?: so far| before)?[?.]?$|"
    r"(?:记得|知道|了解)(?:关于)?我(?:的)?(?:什么|哪些|多少|吗)|我(?:跟|和|对)你(?:说|讲)过(?:什么|哪些)"
)
_CLASSIFIED_CHARS = 500  # of the beginning and of the end: what a message wants is said there

# (what a question asks for, what an answer to it then has). One worth of evidence more if both apply.
_ANSWER_TYPES = (
    (_cue(r"\bwhen\b|\bwhat (?:day|date|time|month)\b|什么时候|何时|几月|几号|哪天|几点|哪一天"), _DATE_VALUE),
    (_cue(r"\bhow (?:many|much|old|long)\b|多少|几"), _cue(r"\d|[一二两三四五六七八九十百千]")),
    (
        _cue(r"\bname\b|\bcalled\b|\bwho\b|名字|叫什么|谁"),
        re.compile(rf"{_CALLED_VALUE.pattern}|{_NAME_VALUE.pattern}"),
    ),
    (_cue(r"\b(?:book|novel|movie|film|song|title)\b|书|小说|电影|歌|片"), _TITLE_VALUE),
    (_cue(r"\bwhere\b|哪里|哪儿|什么地方"), _cue(r"\b(?:in|at|from|to)\b|[在去住到]")),
)
_ASKS_ASSISTANT = _cue(
    r"\b(?:did|have) you (?:\w+ )?(?:recommend|suggest|say|tell|mention|give)|"
    r"\byou (?:recommended|suggested|said|told|gave)\b|\byour (?:recommendation|suggestion|advice)|"
    r"你.{0,6}(?:推荐|建议|说|提|讲|告诉|给).{0,4}(?:我|过)|你的(?:建议|推荐)"
)

_SMALL_TALK_OPENINGS = (
    _cue(r"(?:hi|hello|hey|good (?:morning|evening))\b|[你您]好|嗨|哈喽|早安"),
    _cue(r"thank|[谢多]谢"),
)

_NEIGHBOUR_SHARE = 0.5
_TYPE_EVIDENCE = 0.4
_SPEAKER_EVIDENCE = {"user": 0.4, "assistant": 0.8}  # if one asks for the assistant's words, they are meant
_WORTH_EVIDENCE = 0.05
_NEWER_EVIDENCE = 0.01
_ENOUGH_EVIDENCE = 0.28
_ENOUGH_EVIDENCE_ELSE = 0.5  # a question about the world is only answered if most of it was spoken of
_CLOSE_TO_BEST = 0.6
_MOST_QUOTED = 3
_MOST_LISTED = 5
_SINGLE_HAN_SHARE = 0.35
_MARKED_SHARES = {"#": 0.6, "@": 2.0}  # an everyday concept says less than a word, a calendar day more


def answer(summary: str, messages: Sequence[Utterance], question: str) -> str:
    """A reply from what is in the summary and the messages (oldest first), and from nothing else.

    Chinese for a question with any Han character, else English. Begins with one of `OWN_MARKS`.
    """
    phrases = _CHINESE if _HAN.search(question) else _ENGLISH
    gist = _gist(question)
    if _OVERVIEW.search(gist):
        return _overview(_Context(summary, messages, question), phrases)
    if _REQUEST.search(gist):
        return phrases.cannot_do
    if _ASKS.search(gist):
        context = _Context(summary, messages, question)
        return _quotation(context, _best_matches(context, gist), phrases) or phrases.nothing_found
    return _acknowledgement(question, phrases)


def _gist(message: str) -> str:
    """The comparable beginning and end of a message, which tell what is wanted."""
    line = " ".join(message.split())
    if len(line) > 2 * _CLASSIFIED_CHARS:
        line = f"{line[:_CLASSIFIED_CHARS]} {line[-_CLASSIFIED_CHARS:]}"
    return _comparable(line)


class _Context:
    """The sentences that may be quoted, oldest first: no questions, nothing the offline model said itself."""

    def __init__(self, summary: str, messages: Sequence[Utterance], question: str) -> None:
        kept, day = _read_summary(summary)
        spoken, _ = _read_messages(messages, day)
        asked = {piece.text for piece in _read_messages([Utterance("user", question)], "")[0]}
        pieces = _without_repeats([*kept, *spoken])
        self.pieces = [piece for piece in pieces if not piece.is_question and piece.text not in asked]

    @cached_property
    def corrections(self) -> _Corrections:
        return _Corrections(self.pieces)


def _best_matches(context: _Context, question: str) -> list[int]:
    """The sentences that answer the question best, with what corrects them, oldest first; empty if none does."""
    evidence = _smoothed(_evidence(context.pieces, question), context.pieces)
    enough = _ENOUGH_EVIDENCE if _ABOUT_MEMORY.search(question) else _ENOUGH_EVIDENCE_ELSE
    order = heapq.nlargest(_MOST_QUOTED, range(len(evidence)), key=lambda index: (evidence[index], index))
    if not order or evidence[order[0]] < enough:
        return []
    close = [index for index in order if evidence[index] >= max(enough, _CLOSE_TO_BEST * evidence[order[0]])]
    corrected = {member for index in close for member in context.corrections.chain(index)}
    return sorted(corrected - context.corrections.superseded)


def _evidence(pieces: Sequence[_Piece], question: str) -> list[float]:
    """How much of the question each sentence speaks of, 0 to 1, and a little for being of the kind asked for."""
    asked = _search_terms(question, "")
    spoken = [_search_terms(piece.comparable, piece.day) & asked for piece in pieces]
    frequency = Counter(term for terms in spoken for term in terms)
    weights = {term: _share(term) * math.log(1 + len(pieces) / (frequency[term] + 0.5)) for term in sorted(asked)}
    whole = sum(weights.values())
    subjects = asked & _SUBJECTS
    if not whole or (subjects and not any(frequency[subject] for subject in subjects)):
        return [0.0] * len(pieces)
    shares = [sum(weights[term] for term in sorted(terms)) / whole for terms in spoken]
    wanted = [kind for asks, kind in _ANSWER_TYPES if asks.search(question)]
    speaker = "assistant" if _ASKS_ASSISTANT.search(question) else "user"
    return [
        share and share * _fitness(piece, wanted, speaker) + _NEWER_EVIDENCE * (place / len(pieces))
        for place, (piece, share) in enumerate(zip(pieces, shares, strict=True))
    ]


def _share(term: str) -> float:
    if term[0] in _MARKED_SHARES:
        return _MARKED_SHARES[term[0]]
    return _SINGLE_HAN_SHARE if len(term) == 1 and _HAN.match(term) else 1.0


def _fitness(piece: _Piece, wanted: Sequence[re.Pattern[str]], speaker: str) -> float:
    fitness = 1 + _WORTH_EVIDENCE * min(4.0, piece.worth)
    if any(kind.search(piece.comparable) for kind in wanted):
        fitness += _TYPE_EVIDENCE
    return fitness + (_SPEAKER_EVIDENCE[speaker] if piece.role == speaker else 0.0)


def _smoothed(evidence: Sequence[float], pieces: Sequence[_Piece]) -> list[float]:
    """Sentences lend some evidence to their neighbours: what one names the next one tells of."""
    padded = [0.0, *evidence, 0.0]
    return [
        own + _NEIGHBOUR_SHARE * max(before, after) if pieces[place].worth > 0 else own
        for place, (before, own, after) in enumerate(zip(padded, padded[1:], padded[2:], strict=False))
    ]


@dataclass(frozen=True)
class _Phrases:
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


_ENGLISH = _Phrases(
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
_CHINESE = _Phrases(
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


def _quotation(context: _Context, indices: Sequence[int], phrases: _Phrases) -> str:
    """The sentences quoted, those of the summary first and named as such; empty without sentences."""
    pieces = [context.pieces[index] for index in indices]
    kept = _attributed([piece for piece in pieces if piece.is_kept], phrases)
    spoken = _attributed([piece for piece in pieces if not piece.is_kept], phrases)
    parts = [part for part in (kept and phrases.from_summary + kept, spoken) if part]
    return phrases.between.join([phrases.mark, *parts]) if parts else ""


def _attributed(pieces: Sequence[_Piece], phrases: _Phrases) -> str:
    quotes: list[str] = []
    shown: tuple[str, str] | None = None
    for piece in pieces:
        said = (phrases.said_on if piece.day else phrases.said)[piece.role].format(day=piece.day)
        quotes.append(("" if shown == (piece.role, piece.day) else said) + phrases.quote(piece.text))
        shown = (piece.role, piece.day)
    return phrases.between.join(quotes)


def _overview(context: _Context, phrases: _Phrases) -> str:
    """The facts most worth keeping, as a list of quotations."""
    facts = [
        index
        for index, piece in enumerate(context.pieces)
        if piece.role == "user" and index not in context.corrections.superseded and piece.worth >= _WORTH_KEEPING
    ]
    best = heapq.nlargest(_MOST_LISTED, facts, key=lambda index: (context.pieces[index].worth, index))
    members = {member for index in best for member in context.corrections.chain(index)}
    return _quotation(context, sorted(members), phrases) or phrases.nothing_yet


def _acknowledgement(statement: str, phrases: _Phrases) -> str:
    pieces, _ = _read_messages([Utterance("user", statement)], "")
    fact = max(pieces, key=lambda piece: piece.worth, default=None)
    if fact is None or fact.worth < _WORTH_KEEPING:
        return _small_talk(_gist(statement), phrases)
    noted = phrases.noted[zlib.crc32(fact.text.encode()) % len(phrases.noted)]
    return f"{phrases.mark}{phrases.between}{noted}{phrases.quote(fact.text)}"


def _small_talk(gist: str, phrases: _Phrases) -> str:
    for cue, reply in zip(_SMALL_TALK_OPENINGS, phrases.small_talk, strict=True):
        if cue.match(gist):
            return reply
    return phrases.listening
