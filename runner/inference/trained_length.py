"""The longest conversation that a model was trained on, from the run.json of its run and of the runs whose weights it
started from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.filesystem import read_json_object

MAX_RUNS = 32  # stages that are followed: init_from of a damaged run.json may lead in a circle


@dataclass(frozen=True)
class TrainedLength:
    tokens: int  # of the longest conversation
    answers: int  # most answers of the assistant in one conversation; 0: not known (data.loss_on is not assistant)


def trained_length(folder: Path) -> TrainedLength | None:
    """Return the maxima over all stages; None where they are not known: weights that no run trained from scratch, a
    deleted or an older run.
    """
    tokens = answers = 0
    source = str(folder)
    for _ in range(MAX_RUNS):
        fields = read_json_object(Path(source) / "run.json")
        files, source = fields.get("data"), str(fields.get("init_from"))
        if not isinstance(files, list) or not all(
            isinstance(file, dict) and isinstance(file.get("longest_conversation"), int) for file in files
        ):
            return None
        tokens = max([tokens, *(file["longest_conversation"] for file in files)])
        answers = max([answers, *(count for file in files if isinstance(count := file.get("most_answers"), int))])
        if source == "scratch":
            return TrainedLength(tokens, answers) if tokens else None
    return None
