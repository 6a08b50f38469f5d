"""The characters of a text: which are Chinese, which cannot be shown, and what a text is compared as.

Owns the table of Traditional and Simplified characters. Must not know about words or sentences.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from memora.offline_model.extractive.cues import Cue

_HAN = Cue(r"[\u3400-\u9fff\uf900-\ufaff]", is_case_sensitive=True)
HAN_OR_KANA: Final = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Scripts without spaces between words, as the inside of a character class."""

UNPRINTABLE = re.compile(r"[\x00-\x08\x0e-\x1b\x1f\x7f\ud800-\udfff]")
"""Control characters and lone surrogates: neither can be stored or shown. Line breaks are left for `splitlines`."""

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


def comparable(text: str) -> str:
    """The text as it is compared: letters narrow, apostrophes straight, Traditional as Simplified; case is kept."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text).translate(_TO_SIMPLIFIED)


def has_han(text: str) -> bool:
    """Whether a Chinese character is in the text."""
    return not text.isascii() and _HAN.is_in(text)


def han_of(text: str) -> list[str]:
    """The Chinese characters of the text."""
    return [] if text.isascii() else _HAN.pattern.findall(text)
