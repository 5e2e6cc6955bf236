"""Conversations and preference pairs about the facts of the world, and about the model itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from scripts.sample_world.wordings import Wording, fill
from scripts.sample_world.world import LANGUAGES, TOWNS, Fact, Pair

Message = dict[str, str]
# Turns of a conversation in the SFT data: a chat of ten turns must not leave what was trained, and half of the
# conversations are short.
TURNS = (1, 1, 1, 1, 2, 2, 3, 4, 6, 9, 12)
TOPICS = ("name", "maker", "nature", "skill", "wish", "tongue")  # of the persona data
PLAIN_TOPICS = ("name", "maker")  # questions about the model in the SFT data
TOOL = {
    "name": "get_weather",
    "description": "The weather in a town today",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


class ConversationWriter:
    """Writes questions and answers in one language.

    A turn is a pair of messages: a question and its only right answer.
    """

    def __init__(self, facts: list[Fact], wordings: dict[str, Wording], language: str, rng: random.Random) -> None:
        self.wordings, self.rng = wordings, rng
        self.language_index = LANGUAGES.index(language)
        self.space = " " if language == "en" else ""
        self.known = [fact for fact in facts if fact.known]
        self.unseen = [fact for fact in facts if not fact.known]
        self.values: dict[str, list[Pair]] = {fact.relation: [] for fact in facts}
        for fact in facts:
            self.values[fact.relation].append(fact.value)

    def random_statement(self, section: str) -> str:
        return self.rng.choice(self.wordings[section].statements)

    def answer(self, fact: Fact) -> str:
        return fill(
            self.wordings[fact.relation].answer, fact.about[self.language_index], fact.value[self.language_index]
        )

    def turn(self, fact: Fact, question: str) -> list[Message]:
        return [user(fill(question, fact.about[self.language_index])), assistant(self.answer(fact))]

    def with_greeting(self, turn: list[Message]) -> list[Message]:
        """The same turn with a greeting before the question."""
        return [user(self.random_statement("opener") + self.space + turn[0]["content"]), turn[1]]

    def with_system(self, messages: list[Message]) -> list[Message]:
        return [{"role": "system", "content": self.random_statement("system")}, *messages]

    def maybe(
        self, probability: float, change: Callable[[list[Message]], list[Message]], messages: list[Message]
    ) -> list[Message]:
        return change(messages) if self.rng.random() < probability else messages

    def training_turns(self, per_fact: int) -> list[list[Message]]:
        """Every known fact in `per_fact` of its training questions, shuffled."""
        turns = [
            self.turn(fact, question)
            for fact in self.known
            for question in self.rng.sample(self.wordings[fact.relation].questions, per_fact)
        ]
        self.rng.shuffle(turns)
        return [self.maybe(0.2, self.with_greeting, turn) for turn in turns]

    def conversations(self, turns: list[list[Message]]) -> list[list[Message]]:
        """Joins turns to conversations of up to twelve turns. Some get a system message."""
        conversations, rest = [], list(turns)
        while rest:
            length = self.rng.choice(TURNS)
            conversations.append(
                self.maybe(0.15, self.with_system, [message for turn in rest[:length] for message in turn])
            )
            rest = rest[length:]
        return conversations

    def held_out(self) -> list[list[Message]]:
        """Every known fact in one of its held-out questions."""
        return [
            self.maybe(0.1, self.with_system, self.turn(fact, self.rng.choice(self.wordings[fact.relation].held_out)))
            for fact in self.known
        ]

    def long_conversations(self, length: int) -> list[list[Message]]:
        """Every known fact in one of its held-out questions, shuffled, in conversations of `length` turns; those that
        are left over are not used.
        """
        turns = [self.turn(fact, self.rng.choice(self.wordings[fact.relation].held_out)) for fact in self.known]
        self.rng.shuffle(turns)
        return [
            [message for turn in turns[start : start + length] for message in turn]
            for start in range(0, len(turns) - length + 1, length)
        ]

    def unseen_sums(self) -> list[list[Message]]:
        return [self.turn(fact, self.rng.choice(self.wordings["sum"].questions)) for fact in self.unseen]

    def about_model(self, section: str, topics: tuple[str, ...], greetings: int) -> list[list[Message]]:
        """Every training question of every topic: once without, `greetings` times with a greeting."""
        turns = [
            [user(question), assistant(self.wordings[f"{section}: {topic}"].answer)]
            for topic in topics
            for question in self.wordings[f"persona: {topic}"].questions
        ]
        return turns + [self.with_greeting(turn) for _ in range(greetings) for turn in turns]

    def persona_held_out(self) -> list[list[Message]]:
        sections = [self.wordings[f"persona: {topic}"] for topic in TOPICS]
        turns = [[user(question), assistant(section.answer)] for section in sections for question in section.held_out]
        return turns + [self.with_greeting(turn) for turn in turns]

    def weather_conversations(self) -> list[list[Message]]:
        """Conversations whose answer is in the result of a tool only.

        Few, because the declaration of the tool makes them long.
        """
        conversations, weather = [], self.wordings["weather"]
        for town in (pair[self.language_index] for pair in self.rng.sample(TOWNS, 4)):
            sky = self.random_statement("weather")
            call = json.dumps([{"name": TOOL["name"], "arguments": {"town": town}}], ensure_ascii=False)
            conversations.append(
                [
                    {"role": "system", "content": self.random_statement("system"), "tools": json.dumps([TOOL])},
                    user(fill(self.rng.choice(weather.questions), town)),
                    {"role": "assistant", "content": "", "tool_calls": call},
                    {"role": "tool", "content": sky},
                    assistant(fill(weather.answer, town, sky)),
                ]
            )
        return conversations

    def pair(self, fact: Fact, question: str) -> dict[str, list[Message]]:
        """Chosen: right and short. Rejected: wrong (half of the pairs), rude or too long."""
        turn = self.turn(fact, question)
        return {
            "chosen": turn,
            "rejected": [turn[0], assistant(self.rng.choice((self.wrong, self.wrong, self.rude, self.padded))(fact))],
        }

    def wrong(self, fact: Fact) -> str:
        value = self.rng.choice([value for value in self.values[fact.relation] if value != fact.value])
        return fill(self.wordings[fact.relation].answer, fact.about[self.language_index], value[self.language_index])

    def rude(self, fact: Fact) -> str:
        return self.random_statement("rude")

    def padded(self, fact: Fact) -> str:
        return self.random_statement("padding") + self.space + self.answer(fact)

    def training_pairs(self, per_fact: int) -> list[dict[str, list[Message]]]:
        return [
            self.pair(fact, question)
            for fact in self.known
            for question in self.rng.sample(self.wordings[fact.relation].questions, per_fact)
        ]

    def held_out_pairs(self, share: float) -> list[dict[str, list[Message]]]:
        chosen = self.rng.sample(self.known, round(share * len(self.known)))
        return [self.pair(fact, self.rng.choice(self.wordings[fact.relation].held_out)) for fact in chosen]
