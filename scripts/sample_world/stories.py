"""Pretraining text: portraits, meetings and lessons that state the facts of the world in many ways."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

from scripts.sample_world.wordings import Wording, fill
from scripts.sample_world.world import LANGUAGES, Fact

OF_PEOPLE = ("lives", "works", "likes", "keeps")
LESSONS = ("opposite", "after", "before", "sum")
LESSON_LENGTH = 6  # facts


class StoryWriter:
    """Writes the known facts in one language."""

    def __init__(self, facts: list[Fact], wordings: dict[str, Wording], language: str, rng: random.Random) -> None:
        self.wordings, self.rng = wordings, rng
        self.language_index = LANGUAGES.index(language)
        self.space = " " if language == "en" else ""
        self.by_subject: dict[str, list[Fact]] = defaultdict(list)
        self.by_lesson: dict[str, list[Fact]] = defaultdict(list)
        for fact in filter(lambda fact: fact.known, facts):
            if fact.relation in LESSONS:
                self.by_lesson[fact.relation].append(fact)
            else:
                self.by_subject[fact.about[self.language_index]].append(fact)
        self.people = sorted({fact.about[self.language_index] for fact in facts if fact.relation in OF_PEOPLE})

    def statement(self, fact: Fact) -> str:
        return fill(
            self.rng.choice(self.wordings[fact.relation].statements),
            fact.about[self.language_index],
            fact.value[self.language_index],
        )

    def random_statement(self, section: str) -> str:
        return self.rng.choice(self.wordings[section].statements)

    def join(self, sentences: list[str]) -> str:
        return self.space.join(sentences)

    def portraits(self) -> Iterator[str]:
        """All facts of each person, town and fruit, in random order; two of them twice, in different wordings."""
        for facts in self.by_subject.values():
            chosen = self.rng.sample(facts, len(facts)) + self.rng.sample(facts, 2)
            yield self.join([self.statement(fact) for fact in chosen])

    def meetings(self) -> Iterator[str]:
        for person in self.people:
            other = self.rng.choice([name for name in self.people if name != person])
            middle = [
                self.statement(fact) for name in (person, other) for fact in self.rng.sample(self.by_subject[name], 2)
            ]
            yield self.join(
                [
                    self.random_statement("scene"),
                    self.random_statement("meeting").format(a=person, b=other),
                    *middle,
                    self.random_statement("lore"),
                    self.random_statement("ending"),
                ]
            )

    def lessons(self) -> Iterator[str]:
        for facts in self.by_lesson.values():
            shuffled = self.rng.sample(facts, len(facts))
            for start in range(0, len(shuffled), LESSON_LENGTH):
                yield self.join([self.statement(fact) for fact in shuffled[start : start + LESSON_LENGTH]])

    def all(self, rounds: int) -> list[str]:
        """Every fact at least once per round."""
        return [
            text for _ in range(rounds) for part in (self.portraits, self.meetings, self.lessons) for text in part()
        ]
