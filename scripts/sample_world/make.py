"""Write the sample data, the same bytes every time: `python scripts/sample_world/make.py [FOLDER]` (default:
data/samples).
"""

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
WORDINGS_PER_FACT = 8  # training questions per fact in the SFT data
PAIRS_PER_FACT = 2
VALIDATION_TURNS = 10  # of the conversations of chat_val.jsonl
REPLAYED = 210  # SFT conversations per language in the persona data, against forgetting

Files = dict[str, list[dict]]


def files_of_language(language: str, facts: list[Fact]) -> Files:
    wordings = load_wordings(language)
    stories = StoryWriter(facts, wordings, language, random.Random(f"{SEED} stories {language}"))

    def writer(name: str) -> ConversationWriter:
        """With a generator per file, so that a change of one file leaves the others as they are."""
        return ConversationWriter(facts, wordings, language, random.Random(f"{SEED} {name} {language}"))

    sft, persona = writer("sft"), writer("lora_identity")
    conversations = sft.conversations(sft.training_turns(WORDINGS_PER_FACT))
    chats = {
        "sft": conversations + sft.about_model("plain", PLAIN_TOPICS, greetings=1) + sft.weather_conversations(),
        "sft_val": writer("sft_val").held_out(),
        "chat_val": writer("chat_val").long_conversations(VALIDATION_TURNS),
        "arithmetic_val": writer("arithmetic_val").unseen_sums(),
        "lora_identity": persona.about_model("persona", TOPICS, greetings=2)
        + persona.rng.sample(conversations, REPLAYED),
        "lora_identity_val": writer("lora_identity_val").persona_held_out(),
    }
    return {
        "pretrain": [{"text": text} for text in stories.all(STORY_ROUNDS)],
        "pretrain_val": [{"text": text} for text in stories.all(1)],
        **{name: [{"conversations": messages} for messages in rows] for name, rows in chats.items()},
        "dpo": writer("dpo").training_pairs(PAIRS_PER_FACT),
        "dpo_val": writer("dpo_val").held_out_pairs(0.4),
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
