"""Pretraining text: portraits, meetings, guides and lessons that tell the facts of the world in many ways."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

from scripts.sample_world.wordings import Wording, fill
from scripts.sample_world.world import LANGUAGES, Fact

OF_PEOPLE = ("lives", "works", "likes", "keeps")
LESSONS = ("opposite", "after", "before", "sum")
LESSON_LENGTH = 6  # facts


class Teller:
    """Tells the known facts in one language."""

    def __init__(self, facts: list[Fact], wordings: dict[str, Wording], language: str, rng: random.Random) -> None:
        self.wordings, self.rng = wordings, rng
        self.side = LANGUAGES.index(language)
        self.space = " " if language == "en" else ""
        self.by_subject: dict[str, list[Fact]] = defaultdict(list)
        self.by_lesson: dict[str, list[Fact]] = defaultdict(list)
        for fact in filter(lambda fact: fact.known, facts):
            if fact.relation in LESSONS:
                self.by_lesson[fact.relation].append(fact)
            else:
                self.by_subject[fact.about[self.side]].append(fact)
        self.people = sorted({fact.about[self.side] for fact in facts if fact.relation in OF_PEOPLE})

    def tell(self, fact: Fact) -> str:
        return fill(self.rng.choice(self.wordings[fact.relation].told), fact.about[self.side], fact.value[self.side])

    def one_of(self, section: str) -> str:
        return self.rng.choice(self.wordings[section].told)

    def text(self, sentences: list[str]) -> str:
        return self.space.join(sentences)

    def portraits(self) -> Iterator[str]:
        """All about each person, town and fruit, in random order; some sentences come twice in other words."""
        for facts in self.by_subject.values():
            chosen = self.rng.sample(facts, len(facts)) + self.rng.sample(facts, 2)
            yield self.text([self.tell(fact) for fact in chosen])

    def meetings(self) -> Iterator[str]:
        for person in self.people:
            other = self.rng.choice([name for name in self.people if name != person])
            middle = [self.tell(fact) for name in (person, other) for fact in self.rng.sample(self.by_subject[name], 2)]
            yield self.text([self.one_of("scene"), self.one_of("meeting").format(a=person, b=other), *middle, self.one_of("lore"), self.one_of("ending")])

    def lessons(self) -> Iterator[str]:
        for facts in self.by_lesson.values():
            shuffled = self.rng.sample(facts, len(facts))
            for start in range(0, len(shuffled), LESSON_LENGTH):
                yield self.text([self.tell(fact) for fact in shuffled[start : start + LESSON_LENGTH]])

    def all(self, rounds: int) -> list[str]:
        """Every fact at least once a round."""
        return [text for _ in range(rounds) for part in (self.portraits, self.meetings, self.lessons) for text in part()]
