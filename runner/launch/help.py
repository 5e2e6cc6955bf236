"""The help page. Written without Hydra, so that it is there at once."""
from __future__ import annotations

from runner.launch.words import groups

COMMANDS = (
    ("train.py", "train; also every sweep and every relaunch"),
    ("chat.py", "talk to a trained model:  run=last  prompt=\"...\""),
    ("evaluate.py", "loss, perplexity, exact match on a file:  run=last data.path=FILE"),
    ("tokenizer.py", "train a byte-level BPE tokenizer:  path=[FILE,...] to=DIR"),
)  # fmt: skip
WORDS = (
    ("data.path=FILE", "what to train on"),
    ("train.batch_size=16", "rows of a micro-batch"),
    ("train.accumulation_steps=1", "micro-batches of an optimizer step"),
    ("train.epochs=1", "times through the data ..."),
    ("train.max_steps=0", "... or exactly this many optimizer steps"),
    ("optimizer.lr=5e-4", "highest learning rate"),
    ("data.max_length=512", "tokens of a row"),
    ("init_from=auto", "auto, scratch, or a folder with weights"),
    ("resume=DIR", "continue a run, to the bit"),
    ("hydra.run.dir=DIR", "where the run goes"),
)
EXAMPLES = (
    "python runner/train.py",
    "python runner/train.py stage=sft precision=bf16",
    "python runner/train.py --multirun optimizer.lr=1e-4,5e-4 train.accumulation_steps=1,4",
    "python runner/train.py experiment=minimind_pretrain data.path=my.jsonl",
    "python runner/train.py stage=dpo --cfg job",
)


def page() -> str:
    options = [(f"{name}=", " ".join(files)) for name, files in groups().items()]
    return "\n\n".join(
        [
            "Train a small language model: python runner/train.py [group=option ...] [key=value ...]",
            _table("Commands", COMMANDS),
            _table("Groups", options),
            _table("Words used most (all of them: --cfg job)", WORDS),
            "Examples\n" + "\n".join(f"  {line}" for line in EXAMPLES),
            "Flags\n  --multirun, -m   every combination of comma-separated values\n  --cfg job        print the composed config and leave\n  --hydra-help     Hydra's own flags",
        ]
    )


def _table(title: str, lines) -> str:
    width = max(len(name) for name, _ in lines)
    return f"{title}\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in lines)
