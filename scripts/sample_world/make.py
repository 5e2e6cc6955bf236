"""Write the sample world again, byte for byte: python scripts/sample_world/make.py [folder]"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

if not __package__:  # run by path: Python put this folder first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from scripts.sample_world.stories import Teller
from scripts.sample_world.talks import PLAIN_TOPICS, TOPICS, Asker
from scripts.sample_world.wordings import load
from scripts.sample_world.world import LANGUAGES, Fact, build_world

SEED = 20
STORY_ROUNDS = 10
WORDINGS_EACH = 6  # training wordings in which SFT asks for one fact
PAIRS_EACH = 2
REPLAYED = 500  # ordinary conversations per language among the persona's, so that the rest is not forgotten

Files = dict[str, list[dict]]


def files_of(language: str, facts: list[Fact]) -> Files:
    wordings, rng = load(language), random.Random(f"{SEED} talks {language}")
    teller = Teller(facts, wordings, language, random.Random(f"{SEED} stories {language}"))
    asker = Asker(facts, wordings, language, rng)
    talks = asker.conversations(asker.training_turns(WORDINGS_EACH))
    persona = asker.about_itself("persona", TOPICS, opened=2) + rng.sample(talks, REPLAYED)
    chats = {
        "sft": talks + asker.about_itself("plain", PLAIN_TOPICS, opened=1) + asker.weather_talks(),
        "sft_val": asker.held_out(),
        "arithmetic_val": asker.unseen_sums(),
        "lora_identity": persona,
        "lora_identity_val": asker.persona_held_out(),
    }
    return {
        "pretrain": [{"text": text} for text in teller.all(STORY_ROUNDS)],
        "pretrain_val": [{"text": text} for text in teller.all(1)],
        **{name: [{"conversations": messages} for messages in rows] for name, rows in chats.items()},
        "dpo": asker.training_pairs(PAIRS_EACH),
        "dpo_val": asker.held_out_pairs(0.4),
    }


def write(folder: Path) -> None:
    """Every file of the sample, both languages shuffled together."""
    facts = build_world(random.Random(SEED))
    sides = [files_of(language, facts) for language in LANGUAGES]
    folder.mkdir(parents=True, exist_ok=True)
    for name in sides[0]:
        rows = [row for side in sides for row in side[name]]
        random.Random(f"{SEED} {name}").shuffle(rows)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
