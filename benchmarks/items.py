"""Make 200 short items with one right and two wrong choices, 100 arithmetic and 100 cloze; the same in every run."""

import random
from typing import NamedTuple

CLOZE = {
    "The capital of {} is": "France Paris, Italy Rome, Spain Madrid, Germany Berlin, Japan Tokyo, Russia Moscow,"
    " Egypt Cairo, Greece Athens, Austria Vienna, Poland Warsaw, Ireland Dublin, Norway Oslo, Sweden Stockholm,"
    " Finland Helsinki, Portugal Lisbon, Cuba Havana, Peru Lima, Chile Santiago, Kenya Nairobi, China Beijing,"
    " Iran Tehran, Iraq Baghdad, Turkey Ankara, Thailand Bangkok, Hungary Budapest",
    "The opposite of {} is": "hot cold, big small, up down, left right, day night, black white, open closed, fast slow,"
    " rich poor, young old, happy sad, wet dry, hard soft, high low, light dark, near far, strong weak, early late,"
    " full empty, love hate, war peace, true false, good bad, first last, buy sell",
    "The past tense of the verb {} is": "go went, see saw, eat ate, take took, give gave, come came, write wrote,"
    " run ran, buy bought, think thought, bring brought, know knew, fly flew, drink drank, sing sang, break broke,"
    " speak spoke, drive drove, fall fell, find found, make made, teach taught, catch caught, sleep slept, win won",
    "The plural of the word {} is": "man men, woman women, child children, foot feet, tooth teeth, mouse mice,"
    " goose geese, knife knives, leaf leaves, wolf wolves, city cities, baby babies, box boxes, bus buses, dog dogs,"
    " cat cats, tree trees, house houses, potato potatoes, hero heroes, story stories, wife wives, ox oxen,"
    " person people, half halves",
}


class Item(NamedTuple):
    """A stem and its choices; the first one is right."""

    stem: str
    choices: tuple[str, str, str]


def items() -> list[Item]:
    """Return arithmetic items, then cloze items. A wrong choice of a cloze item is the right one of another item."""
    rng = random.Random(0)
    result: list[Item] = []
    while len(result) < 100:
        item = _arithmetic(rng, len(result))
        if item.stem not in {other.stem for other in result}:
            result.append(item)
    for stem, pairs in CLOZE.items():
        words = [pair.split() for pair in pairs.split(", ")]
        for word, right in words:
            wrong = rng.sample([other for _, other in words if other != right], 2)
            result.append(Item(stem.format(word), (f" {right}", f" {wrong[0]}", f" {wrong[1]}")))
    return result


def _arithmetic(rng: random.Random, place: int) -> Item:
    sign = "+-*"[place % 3]
    one, other = rng.randint(2, 12 if sign == "*" else 30), rng.randint(2, 9)
    one, other = max(one, other), min(one, other)
    right = {"+": one + other, "-": one - other, "*": one * other}[sign]
    wrong = rng.sample([right + step for step in (-2, -1, 1, 2, 10) if right + step >= 0], 2)
    return Item(f"{one} {sign} {other} =", (f" {right}", f" {wrong[0]}", f" {wrong[1]}"))
