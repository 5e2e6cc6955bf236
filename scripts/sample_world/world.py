"""The invented world: its people, towns and fruits, and every fact about them, drawn from a seed.

Names are pairs (English, Chinese); no such person, place or thing exists.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LANGUAGES = ("en", "zh")

Pair = tuple[str, str]


def pairs(text: str) -> list[Pair]:
    """One "English name:Chinese name" between commas."""
    return [(english.strip(), chinese.strip()) for english, chinese in (item.split(":") for item in text.split(","))]


PEOPLE = pairs(
    "Tolo:托洛, Mina:米娜, Ruko:鲁科, Sefa:赛法, Dalu:达鲁, Nori:诺里, Pavo:帕沃, Lira:莉拉, Bento:本托, Cusi:库西, Yara:雅拉, Goro:戈罗, "
    "Hanu:哈努, Jibo:吉博, Kesi:凯西, Ludo:卢多, Mavi:马维, Nilo:尼洛, Olba:奥巴, Pira:皮拉, Quen:昆恩, Rima:丽玛, Suli:苏里, Tavi:塔维, "
    "Umbo:翁博, Vela:维拉, Wano:瓦诺, Xeno:泽诺, Yodi:约迪, Zima:齐玛, Arlo:阿洛, Bixi:比西"
)
TOWNS = pairs(
    "Lumo:卢莫, Pell:佩尔, Dunby:敦比, Oster:奥斯特, Wick:维克, Sarro:萨罗, Fenna:芬纳, Tibo:蒂博, Kova:科瓦, Hale:哈勒"
)
LANDS = pairs("Mirra:米拉国, Talvo:塔沃国, Ovara:奥瓦国, Brenna:布伦国, Kello:凯洛国")
JOBS = pairs(
    "baker:面包师, fisher:渔夫, painter:画家, carpenter:木匠, teacher:老师, gardener:园丁, weaver:织工, potter:陶匠, beekeeper:养蜂人, doctor:医生"
)
COLOURS = pairs("red:红色, blue:蓝色, green:绿色, yellow:黄色, white:白色, black:黑色, purple:紫色, brown:棕色")
PETS = pairs(
    "cat:猫, dog:狗, goat:山羊, rabbit:兔子, duck:鸭子, hen:母鸡, turtle:乌龟, parrot:鹦鹉, frog:青蛙, sheep:绵羊"
)
DISHES = pairs(
    "honey cake:蜂蜜蛋糕, plum soup:李子汤, fish pie:鱼馅饼, nut bread:坚果面包, goat cheese:羊奶酪, rice pudding:米布丁, pumpkin stew:南瓜炖菜, mint tea:薄荷茶, pear jam:梨子酱, corn noodles:玉米面条"
)
DAYS = pairs(
    "Monday:星期一, Tuesday:星期二, Wednesday:星期三, Thursday:星期四, Friday:星期五, Saturday:星期六, Sunday:星期日"
)
FRUITS = pairs(
    "mipple:米普果, sunpod:日荚果, dorberry:多莓, lunafig:月芒果, tikmelon:提克瓜, rosnut:罗斯果, velplum:维李, osgrape:奥葡萄, bimbean:宾豆, karpear:卡梨, zolpepper:佐椒, fenroot:芬根"
)
TASTES = pairs("sweet:甜, sour:酸, bitter:苦, salty:咸, spicy:辣")
PLACES = pairs(
    "in the hills:山坡上, in the marsh:沼泽里, in the forest:森林里, in the desert:沙漠里, on the beach:海滩上, in the meadow:草地上, on the rocks:岩石上, in the cave:山洞里"
)
OPPOSITES = [  # in both languages: (hot, cold), (热, 冷)
    (("hot", "cold"), ("热", "冷")),
    (("big", "small"), ("大", "小")),
    (("tall", "short"), ("高", "矮")),
    (("fast", "slow"), ("快", "慢")),
    (("open", "closed"), ("开", "关")),
    (("full", "empty"), ("满", "空")),
    (("wet", "dry"), ("湿", "干")),
    (("hard", "soft"), ("硬", "软")),
    (("old", "new"), ("旧", "新")),
    (("light", "dark"), ("亮", "暗")),
    (("early", "late"), ("早", "晚")),
    (("happy", "sad"), ("开心", "难过")),
    (("loud", "quiet"), ("吵闹", "安静")),
    (("near", "far"), ("近", "远")),
    (("up", "down"), ("上", "下")),
    (("left", "right"), ("左", "右")),
    (("clean", "dirty"), ("干净", "肮脏")),
    (("thick", "thin"), ("厚", "薄")),
    (("strong", "weak"), ("强", "弱")),
    (("deep", "shallow"), ("深", "浅")),
]
LARGEST_NUMBER = 20  # of the facts about counting: 8 comes after 7
LARGEST_ADDEND = 9
UNSEEN_SUMS = 8  # unordered pairs of addends that are in no training file; none with 0 or 1, which counting contains


@dataclass(frozen=True)
class Fact:
    """A fact in both languages. `about` fills {a} of a wording, `value` fills {b}."""

    relation: str
    about: Pair
    value: Pair
    known: bool = True  # False: a sum that is in no training file


def draw_evenly(rng: random.Random, options: list[Pair], count: int) -> list[Pair]:
    """`count` options in random order, each about equally often."""
    deck = (options * (count // len(options) + 1))[:count]
    rng.shuffle(deck)
    return deck


def random_facts(rng: random.Random, relation: str, abouts: list[Pair], values: list[Pair]) -> list[Fact]:
    return [
        Fact(relation, about, value) for about, value in zip(abouts, draw_evenly(rng, values, len(abouts)), strict=True)
    ]


def number_facts() -> list[Fact]:
    after = [Fact("after", (str(n),) * 2, (str(n + 1),) * 2) for n in range(1, LARGEST_NUMBER)]
    return after + [Fact("before", fact.value, fact.about) for fact in after]


def sum_facts(rng: random.Random) -> list[Fact]:
    addends = range(LARGEST_ADDEND + 1)
    ordered = [(a, b) for a in addends for b in addends]
    unseen = set(rng.sample([(a, b) for a, b in ordered if 2 <= a <= b], UNSEEN_SUMS))
    return [
        Fact("sum", (f"{a} + {b}",) * 2, (str(a + b),) * 2, known=(min(a, b), max(a, b)) not in unseen)
        for a, b in ordered
    ]


def opposite_facts() -> list[Fact]:
    facts = []
    for english, chinese in OPPOSITES:
        one, other = zip(english, chinese, strict=True)
        facts += [Fact("opposite", one, other), Fact("opposite", other, one)]
    return facts


def build_world(rng: random.Random) -> list[Fact]:
    return [
        *random_facts(rng, "lives", PEOPLE, TOWNS),
        *random_facts(rng, "works", PEOPLE, JOBS),
        *random_facts(rng, "likes", PEOPLE, COLOURS),
        *random_facts(rng, "keeps", PEOPLE, PETS),
        *random_facts(rng, "dish", TOWNS, DISHES),
        *random_facts(rng, "roofs", TOWNS, COLOURS),
        *random_facts(rng, "market", TOWNS, DAYS),
        *random_facts(rng, "land", TOWNS, LANDS),
        *random_facts(rng, "fruit_colour", FRUITS, COLOURS),
        *random_facts(rng, "taste", FRUITS, TASTES),
        *random_facts(rng, "grows", FRUITS, PLACES),
        *opposite_facts(),
        *number_facts(),
        *sum_facts(rng),
    ]
