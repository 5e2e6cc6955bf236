"""The help pages. Written without Hydra, so that they are there at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from common.paths import CONF_DIR
from runner.config.schema import config_groups

COMMANDS = (
    ("train.py", "train; also every sweep and every relaunch"),
    ("rows.py", "see rows as the model will see them:  stage=sft n=3"),
    ("chat.py", "talk to a trained model:  run=last  prompt=\"...\""),
    ("evaluate.py", "loss, perplexity, exact match on a file:  run=last data.path=FILE"),
    ("report.py", "which point of a sweep won:  sweep=last"),
    ("tokenizer.py", "train a byte-level BPE tokenizer:  path=[FILE,...] to=DIR"),
)  # fmt: skip
COMMON_SETTINGS = (  # a stage, a model or an experiment has values of its own: none is given here as if it were the default
    ("data.path=FILE", "what to train on"),
    ("data.max_length=N", "tokens of a row, and of a packed window, e.g. 512"),
    ("data.packing=KIND", "best_fit: several rows in a window; none: every row a line of its own"),
    ("train.batch_size=N", "lines of a micro-batch: windows, or rows where nothing is packed"),
    ("train.accumulation_steps=N", "micro-batches of an optimizer step, e.g. 8"),
    ("train.epochs=N", "times through the data, e.g. 2 ..."),
    ("train.max_steps=N", "... or exactly this many optimizer steps, e.g. 1000; 0: what the epochs hold"),
    ("train.eval_every=N", "steps between evaluations, e.g. 100; likewise save_every, sample_every; 0: never"),
    ("optimizer.lr=X", "highest learning rate, e.g. 5e-4"),
    ("distributed.nproc=N", "processes that train together, with distributed=ddp or fsdp; auto: one for each GPU"),
    ("init_from=DIR", "where the first weights come from: auto, scratch, or a folder with weights"),
    ("resume=DIR", "continue a run, to the bit; resume=last the newest"),
    ("hydra.run.dir=DIR", "where the run goes"),
)
EXAMPLES = (
    "python runner/train.py",
    "python runner/train.py stage=sft precision=bf16",
    "python runner/train.py --multirun optimizer.lr=1e-4,5e-4 train.accumulation_steps=1,4",
    "torchrun --nproc-per-node=2 runner/train.py distributed=ddp",
    "python runner/train.py experiment=minimind_pretrain data.path=my.jsonl",
    "python runner/train.py stage=dpo --cfg job",
)


def train_help() -> str:
    options = [(f"{name}=", " ".join(files)) for name, files in config_groups().items()]
    return "\n\n".join(
        [
            "Train a small language model: python runner/train.py [group=option ...] [key=value ...]",
            _two_columns("Commands (each has its own --help)", COMMANDS),
            _two_columns("Groups", options),
            _two_columns("Words used most (all of them, with their values: --cfg job)", COMMON_SETTINGS),
            "Examples\n" + "\n".join(f"  {line}" for line in EXAMPLES),
            "Flags\n  --multirun, -m   every combination of comma-separated values\n  --cfg job        print the composed config and leave\n  --hydra-help     Hydra's own flags",
        ]
    )


FLAGS_HELP = "Flags\n  --cfg job        print the words with their values and leave\n  --hydra-help     Hydra's own flags"


def subcommand_help(name: str, about: str, flags: str = FLAGS_HELP) -> str:
    """The page of a small command: its docstring, and the words of conf/<name>.yaml with their values and comments."""
    title = "Words, as they stand when they are not given; one with ... has to be given"
    return "\n\n".join(
        [
            about.strip().replace("`", ""),
            _two_columns(title, [(f"{word}={'...' if value == '???' else value}", comment) for word, value, comment in _settings(name)]),
            flags,
        ]
    )


def _settings(name: str) -> Iterator[tuple[str, str, str]]:
    """(word, value, comment) of each line of a flat conf file, or of one whose sections hold no sections."""
    section = ""
    text = (CONF_DIR / f"{name}.yaml").read_text(encoding="utf-8").partition("\nhydra:")[0]
    for indent, word, value, comment in re.findall(r"^( *)(\w+):(?: ([^#\n]*\S))?(?: +# (.*))?$", text, re.MULTILINE):
        if not indent:
            section = "" if value else f"{word}."
        if value:
            yield f"{section}{word}", value, comment


def _two_columns(title: str, lines: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines)
    return f"{title}\n" + "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in lines)
