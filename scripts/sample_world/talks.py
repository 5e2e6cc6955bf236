"""Conversations and preference pairs about the facts of the world, and about the model itself."""

from __future__ import annotations

import json
import random

from scripts.sample_world.wordings import Wording, fill
from scripts.sample_world.world import LANGUAGES, TOWNS, Fact, Pair

Message = dict[str, str]
TOPICS = ("name", "maker", "nature", "skill", "wish", "tongue")  # of the persona
PLAIN_TOPICS = ("name", "maker")  # what the model says of itself before it has the persona
TOOL = {
    "name": "get_weather",
    "description": "The weather in a town today",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Asker:
    """Asks and answers in one language. A turn is a pair of messages: the question and its one right answer."""

    def __init__(self, facts: list[Fact], wordings: dict[str, Wording], language: str, rng: random.Random) -> None:
        self.wordings, self.rng = wordings, rng
        self.side = LANGUAGES.index(language)
        self.space = " " if language == "en" else ""
        self.known = [fact for fact in facts if fact.known]
        self.unseen = [fact for fact in facts if not fact.known]
        self.values: dict[str, list[Pair]] = {fact.relation: [] for fact in facts}
        for fact in facts:
            self.values[fact.relation].append(fact.value)

    def one_of(self, section: str) -> str:
        return self.rng.choice(self.wordings[section].told)

    def answer(self, fact: Fact) -> str:
        return fill(self.wordings[fact.relation].answer, fact.about[self.side], fact.value[self.side])

    def turn(self, fact: Fact, question: str) -> list[Message]:
        return [user(fill(question, fact.about[self.side])), assistant(self.answer(fact))]

    def opened(self, turn: list[Message]) -> list[Message]:
        """The same turn with a word of greeting before the question."""
        return [user(self.one_of("opener") + self.space + turn[0]["content"]), turn[1]]

    def with_system(self, messages: list[Message]) -> list[Message]:
        return [{"role": "system", "content": self.one_of("system")}, *messages]

    def sometimes(self, share: float, change, messages: list[Message]) -> list[Message]:
        return change(messages) if self.rng.random() < share else messages

    def training_turns(self, wordings_each: int) -> list[list[Message]]:
        """Every known fact in `wordings_each` of its training wordings, shuffled."""
        turns = [self.turn(fact, question) for fact in self.known for question in self.rng.sample(self.wordings[fact.relation].asked, wordings_each)]
        self.rng.shuffle(turns)
        return [self.sometimes(0.2, self.opened, turn) for turn in turns]

    def conversations(self, turns: list[list[Message]]) -> list[list[Message]]:
        """Strings turns together, mostly two: rows of like length waste little padding. Some get a system message."""
        talks, rest = [], list(turns)
        while rest:
            length = self.rng.choice((1, 2, 2, 2))
            talks.append(self.sometimes(0.15, self.with_system, [message for turn in rest[:length] for message in turn]))
            rest = rest[length:]
        return talks

    def held_out(self) -> list[list[Message]]:
        """Every known fact in one of its held-out wordings."""
        return [self.sometimes(0.1, self.with_system, self.turn(fact, self.rng.choice(self.wordings[fact.relation].held))) for fact in self.known]

    def unseen_sums(self) -> list[list[Message]]:
        return [self.turn(fact, self.rng.choice(self.wordings["sum"].asked)) for fact in self.unseen]

    def about_itself(self, section: str, topics: tuple[str, ...], opened: int) -> list[list[Message]]:
        """Every training wording of every topic: once plain, `opened` times after a greeting."""
        turns = [
            [user(question), assistant(self.wordings[f"{section}: {topic}"].answer)]
            for topic in topics
            for question in self.wordings[f"persona: {topic}"].asked
        ]
        return turns + [self.opened(turn) for _ in range(opened) for turn in turns]

    def persona_held_out(self) -> list[list[Message]]:
        sections = [self.wordings[f"persona: {topic}"] for topic in TOPICS]
        turns = [[user(question), assistant(section.answer)] for section in sections for question in section.held]
        return turns + [self.opened(turn) for turn in turns]

    def weather_talks(self) -> list[list[Message]]:
        """The answer stands in what the tool says, nowhere else. Few, for the declaration of the tool makes long rows."""
        talks, weather = [], self.wordings["weather"]
        for town in (pair[self.side] for pair in self.rng.sample(TOWNS, 4)):
            sky = self.one_of("weather")
            call = json.dumps([{"name": TOOL["name"], "arguments": {"town": town}}], ensure_ascii=False)
            talks.append(
                [
                    {"role": "system", "content": self.one_of("system"), "tools": json.dumps([TOOL])},
                    user(fill(self.rng.choice(weather.asked), town)),
                    {"role": "assistant", "content": "", "tool_calls": call},
                    {"role": "tool", "content": sky},
                    assistant(fill(weather.answer, town, sky)),
                ]
            )
        return talks

    def pair(self, fact: Fact, question: str) -> dict[str, list[Message]]:
        """Right and short against wrong (half of the pairs), rude or long-winded."""
        turn = self.turn(fact, question)
        return {"chosen": turn, "rejected": [turn[0], assistant(self.rng.choice((self.wrong, self.wrong, self.rude, self.padded))(fact))]}

    def wrong(self, fact: Fact) -> str:
        value = self.rng.choice([value for value in self.values[fact.relation] if value != fact.value])
        return fill(self.wordings[fact.relation].answer, fact.about[self.side], value[self.side])

    def rude(self, fact: Fact) -> str:
        return self.one_of("rude")

    def padded(self, fact: Fact) -> str:
        return self.one_of("padding") + self.space + self.answer(fact)

    def training_pairs(self, wordings_each: int) -> list[dict[str, list[Message]]]:
        return [self.pair(fact, question) for fact in self.known for question in self.rng.sample(self.wordings[fact.relation].asked, wordings_each)]

    def held_out_pairs(self, share: float) -> list[dict[str, list[Message]]]:
        chosen = self.rng.sample(self.known, round(share * len(self.known)))
        return [self.pair(fact, self.rng.choice(self.wordings[fact.relation].held)) for fact in chosen]
