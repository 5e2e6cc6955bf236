"""Write the sample data, the same bytes every time: `python scripts/sample_world/make.py [FOLDER]` (default: data/samples)."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

if not __package__:  # run by path: import from the root of the repository instead of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.sample_world.conversations import PLAIN_TOPICS, TOPICS, ConversationWriter
from scripts.sample_world.stories import StoryWriter
from scripts.sample_world.wordings import load_wordings
from scripts.sample_world.world import LANGUAGES, Fact, build_world

DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "data" / "samples"
SEED = 20
STORY_ROUNDS = 10
WORDINGS_PER_FACT = 6  # training questions per fact in the SFT data
PAIRS_PER_FACT = 2
REPLAYED = 500  # SFT conversations per language in the persona data, against forgetting

Files = dict[str, list[dict]]


def files_of_language(language: str, facts: list[Fact]) -> Files:
    wordings, rng = load_wordings(language), random.Random(f"{SEED} talks {language}")
    stories = StoryWriter(facts, wordings, language, random.Random(f"{SEED} stories {language}"))
    writer = ConversationWriter(facts, wordings, language, rng)
    conversations = writer.conversations(writer.training_turns(WORDINGS_PER_FACT))
    persona = writer.about_model("persona", TOPICS, greetings=2) + rng.sample(conversations, REPLAYED)
    chats = {
        "sft": conversations + writer.about_model("plain", PLAIN_TOPICS, greetings=1) + writer.weather_conversations(),
        "sft_val": writer.held_out(),
        "arithmetic_val": writer.unseen_sums(),
        "lora_identity": persona,
        "lora_identity_val": writer.persona_held_out(),
    }
    return {
        "pretrain": [{"text": text} for text in stories.all(STORY_ROUNDS)],
        "pretrain_val": [{"text": text} for text in stories.all(1)],
        **{name: [{"conversations": messages} for messages in rows] for name, rows in chats.items()},
        "dpo": writer.training_pairs(PAIRS_PER_FACT),
        "dpo_val": writer.held_out_pairs(0.4),
    }


def write_samples(folder: Path) -> None:
    """Write all files, the rows of both languages in random order."""
    facts = build_world(random.Random(SEED))
    files = [files_of_language(language, facts) for language in LANGUAGES]
    folder.mkdir(parents=True, exist_ok=True)
    for name in files[0]:
        rows = [row for rows_by_name in files for row in rows_by_name[name]]
        random.Random(f"{SEED} {name}").shuffle(rows)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER)
