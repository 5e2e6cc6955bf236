"""One case of benchmarks/speed.py in a process of its own: says a line of JSON for each step it is asked for on stdin.

Every trainer is driven by the batches it is given: a step is the time from asking for a batch to asking for the next one.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import runpy
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Count = Callable[[Any], tuple[int, int, list[int]]]  # batch -> positions that are no padding, positions computed, lengths attention sees
UNMASKED = -100
COUNTED = 150  # batches by which padding is told: those that are timed are too few
SECONDS = 0.5  # that a machine's peak is measured over, each round


class Gate:
    """Deals batches when told to, and tells how long each was worked on."""

    def __init__(self, spec: dict) -> None:
        self.spec, self.told = spec, os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a trainer prints is no measurement

    def tell(self, **facts: Any) -> None:
        print(json.dumps(facts), file=self.told, flush=True)

    def wait(self) -> str:
        word = sys.stdin.readline().strip()
        if not word:
            os._exit(0)  # nothing of a trainer's end is measured
        return word

    def through(self, batches: Iterable, count: Count) -> Iterator:
        batches = iter(batches)
        while True:
            if self.wait() == "fill":
                counts = [count(batch)[:2] for batch in itertools.islice(batches, COUNTED)]
                self.tell(useful=sum(useful for useful, _ in counts), computed=sum(computed for _, computed in counts))
                continue
            began, worked = time.perf_counter(), time.process_time()
            batch = next(batches, None)
            if batch is None:
                self.tell(error="the data is used up: give more of it")
                os._exit(1)
            useful, computed, lengths = count(batch)
            yield batch
            spent, work = time.perf_counter() - began, time.process_time() - worked
            self.tell(seconds=spent, cpu=work, useful=useful, computed=computed, flops=self.flops(computed, lengths), memory=memory())

    def flops(self, computed: int, lengths: list[int]) -> float:
        """Of forward and backward; attention looks back only, and only at what it has to."""
        model = self.spec["model"]
        attention = 6 * model["num_hidden_layers"] * model["num_attention_heads"] * model["head_dim"] * sum(length**2 for length in lengths)
        return 6.0 * self.spec["parameters"] * computed + attention


def memory() -> float:
    """Peak of this process in MB, on the GPU where there is one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def forever(batches: Iterable) -> Iterator:
    while True:
        yield from batches


def run_of(spec: dict, *words: str) -> Any:
    """Our run, ready for its first step: its rows are what every other trainer gets too."""
    from runner.engine.run import build_run
    from runner.launch.compose import compose

    return build_run(compose([*spec["words"], *words]), Path(tempfile.mkdtemp()), attempt=1, note=lambda **facts: None)


def ours(spec: dict, gate: Gate, packing: str, compiled: bool, cut: bool = False, again: str = "none") -> None:
    from runner.engine.loop import train_step

    words = [f"precision={spec['precision']}", f"data.packing={packing}", f"train.compile={'default' if compiled else 'off'}", "train.epochs=100"]
    words += [f"train.activation_checkpointing={again}"] if again != "none" else []
    run = run_of(spec, *words, *(["data.too_long=truncate"] if cut else []))
    steps = (batches for epoch in range(100) for batches in run.loader.steps(epoch) if len(batches[0].input_ids) == spec["lines"])

    def count(batches: list) -> tuple[int, int, list[int]]:
        lengths = [int(length) for batch in batches for length in batch.lengths]
        computed = sum(batch.input_ids.numel() for batch in batches)
        return sum(lengths), computed, lengths if packing == "pack" else [batch.input_ids.shape[1] for batch in batches for _ in batch.input_ids]

    for batches in gate.through(steps, count):
        train_step(run, batches, lr=1e-4)


def windows(spec: dict) -> list[list[int]]:
    """All rows one after the other, cut into lines of equal length: how these trainers pack."""
    run, length = run_of(spec, "data.packing=none", "data.too_long=auto"), spec["length"]
    tokens = [int(token) for window in range(len(run.feed.train)) for row in run.feed.train[window] for token in row.sequences[0].ids]
    return [tokens[at : at + length] for at in range(0, len(tokens) - length, length)]


def all_of(batch: dict) -> tuple[int, int, list[int]]:
    lines, length = batch["input_ids"].shape
    return lines * length, lines * length, [length] * lines


def transformers_model(spec: dict) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")
    settings = {name: spec["model"][name] for name in names}
    return Qwen3ForCausalLM(Qwen3Config(**settings, tie_word_embeddings=True, rope_theta=1e6, max_position_embeddings=32768, use_cache=False))


def arguments(spec: dict, compiled: bool) -> dict[str, Any]:
    import torch

    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": spec["lines"],
        "max_steps": 1_000_000,
        "bf16": spec["precision"] == "bf16",
        "torch_compile": compiled,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 50,
        "optim": "adamw_torch_fused",
        "disable_tqdm": True,
    }


def hf(spec: dict, gate: Gate, compiled: bool) -> None:
    from transformers import Trainer, TrainingArguments

    class Gated(Trainer):
        def get_train_dataloader(self) -> Any:
            return Loader(super().get_train_dataloader(), gate, all_of)

    rows = [{"input_ids": window, "labels": window} for window in windows(spec)]
    Gated(model=transformers_model(spec), args=TrainingArguments(**arguments(spec, compiled)), train_dataset=rows).train()  # type: ignore[arg-type]  # a list serves as a dataset


class Loader:
    def __init__(self, inner: Any, gate: Gate, count: Count) -> None:
        self.inner, self.gate, self.count = inner, gate, count

    def __len__(self) -> int:
        return 1_000_000  # it never ends, so that no epoch does

    def __iter__(self) -> Iterator:
        return self.gate.through(forever(self.inner), self.count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def trl(spec: dict, gate: Gate, packing: bool) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    def count(batch: dict) -> tuple[int, int, list[int]]:
        lines, length = batch["input_ids"].shape
        mask = batch.get("attention_mask")
        return int((batch["labels"] != UNMASKED).sum()) if mask is None else int(mask.sum()), lines * length, [length] * lines

    class Gated(SFTTrainer):
        def get_train_dataloader(self) -> Any:
            return Loader(super().get_train_dataloader(), gate, count)

    rows = Dataset.from_list([json.loads(line) for line in Path(spec["neutral"]["messages"]).read_text().splitlines()])
    settings = SFTConfig(**arguments(spec, False), max_length=spec["length"], packing=packing, gradient_checkpointing=False)
    Gated(model=transformers_model(spec), args=settings, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(spec["tokenizer"])).train()


def minimind(spec: dict, gate: Gate) -> None:
    """Its own script, unchanged but for the shape of the model, where tokenizer and weights come from, and autocast on a processor."""
    script = Path(spec["minimind"]) / "trainer" / ("train_pretrain.py" if spec["stage"] == "pretrain" else "train_full_sft.py")
    source = script.read_text(encoding="utf-8")
    if spec["precision"] == "bf16":
        source = source.replace('nullcontext() if device_type == "cpu"', "torch.autocast(device_type, dtype) if True")
    shape = {name: spec["model"][name] for name in ("num_key_value_heads", "intermediate_size", "vocab_size")}
    source = source.replace("MiniMindConfig(hidden_size", f"MiniMindConfig(**{shape}, hidden_size")
    source = source.replace("init_model(lm_config, ", f"init_model(lm_config, tokenizer_path={spec['tokenizer']!r}, from_weight=")
    source = re.sub(r"from_weight=args\.from_weight", "from_weight='none'", source)
    source = source.replace("loader = DataLoader(", "loader = GATED(").replace("def train_epoch(", "from speed_cases import GATED\n\n\ndef train_epoch(", 1)
    place = Path(tempfile.mkdtemp()) / "trainer"
    place.mkdir()
    (place / "script.py").write_text(source, encoding="utf-8")
    sys.path[:0] = [str(Path(spec["minimind"])), str(ROOT / "benchmarks")]
    import speed_cases

    def count(batch: Any) -> tuple[int, int, list[int]]:
        ids = batch[0]
        return int((ids != spec["pad_id"]).sum()), ids.numel(), [ids.shape[1]] * len(ids)

    def gated(dataset: Any, **words: Any) -> Loader:
        from torch.utils.data import DataLoader

        return Loader(DataLoader(dataset, **words), gate, count)

    speed_cases.GATED = gated
    os.chdir(place)
    sys.argv = [
        "script.py", "--data_path", spec["neutral"]["rows"], "--batch_size", str(spec["lines"]), "--max_seq_len", str(spec["length"]), "--accumulation_steps", "1",
        "--hidden_size", str(spec["model"]["hidden_size"]), "--num_hidden_layers", str(spec["model"]["num_hidden_layers"]), "--num_workers", "0",
        "--dtype", "bfloat16", "--save_interval", "100000000",
    ]  # fmt: skip
    runpy.run_path("script.py", run_name="__main__")


GATED: Any = None  # what MiniMind's script takes its batches from


def litgpt(spec: dict, gate: Gate, compiled: bool) -> None:
    """Its model in the loop its recipe prescribes: fused AdamW, clipping, cross-entropy over whole windows."""
    import torch

    # Its package imports Lightning, which its model does not need: two modules stand for what would.
    package, unused = types.ModuleType("litgpt"), types.ModuleType("litgpt.scripts.convert_hf_checkpoint")
    package.__path__, unused.qkv_reassemble = [f"{spec['litgpt']}/litgpt"], None  # type: ignore[attr-defined]  # modules made here
    sys.modules |= {"litgpt": package, "litgpt.scripts.convert_hf_checkpoint": unused}
    from litgpt.config import Config
    from litgpt.model import GPT

    shape = spec["model"]
    torch.manual_seed(0)
    model: Any = GPT(Config(
        block_size=spec["length"], vocab_size=shape["vocab_size"], padded_vocab_size=shape["vocab_size"], n_layer=shape["num_hidden_layers"], n_head=shape["num_attention_heads"],
        n_query_groups=shape["num_key_value_heads"], n_embd=shape["hidden_size"], head_size=shape["head_dim"], rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", norm_qk=True, mlp_class_name="LLaMAMLP", intermediate_size=shape["intermediate_size"], rope_base=1_000_000,
    ))  # fmt: skip
    model.lm_head.weight = model.transformer.wte.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model) if compiled else model
    data = torch.tensor(windows(spec))
    for lines in gate.through(forever([{"input_ids": part} for part in data.split(spec["lines"]) if len(part) == spec["lines"]]), all_of):
        ids = lines["input_ids"]
        with torch.autocast("cpu", torch.bfloat16, enabled=spec["precision"] == "bf16"):
            loss = torch.nn.functional.cross_entropy(forward(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def machine(spec: dict, gate: Gate) -> None:
    """What the machine can do: a large matrix product in this precision, and copying."""
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    size = 8192 if kind == "cuda" else 2048
    a, b = (torch.randn(size, size, device=kind, dtype=getattr(torch, "bfloat16" if spec["precision"] == "bf16" else "float32")) for _ in range(2))
    source = torch.ones(1 << 26, device=kind)
    target = torch.empty_like(source)

    def pace(work: Callable[[], object]) -> tuple[float, float]:
        """Seconds and processor seconds each time, over as long a stretch as a step: what disturbs the one disturbs the other."""
        began, worked, times = time.perf_counter(), time.process_time(), 0
        while (spent := time.perf_counter() - began) < SECONDS:
            work()
            if kind == "cuda":
                torch.cuda.synchronize()
            times += 1
        return spent / times, (time.process_time() - worked) / times

    while gate.wait():
        (product, cpu), (copy, _) = pace(lambda: a @ b), pace(lambda: target.copy_(source))
        gate.tell(seconds=product, cpu=cpu, useful=0, computed=0, flops=2.0 * size**3, copied=2 * source.nbytes / copy, memory=memory())


CASES: dict[str, Callable[[dict, Gate], None]] = {
    "machine": machine,
    "ours, packed": lambda spec, gate: ours(spec, gate, "pack", compiled=False),
    "ours, packed, compiled": lambda spec, gate: ours(spec, gate, "pack", compiled=True),
    "ours, padded": lambda spec, gate: ours(spec, gate, "none", compiled=False, cut=True),
    "MiniMind's script": minimind,
    "HF Trainer, packed": lambda spec, gate: hf(spec, gate, compiled=False),
    "HF Trainer, packed, compiled": lambda spec, gate: hf(spec, gate, compiled=True),
    "TRL SFTTrainer, padded": lambda spec, gate: trl(spec, gate, packing=False),
    "TRL SFTTrainer, packed": lambda spec, gate: trl(spec, gate, packing=True),
    "litgpt, windows": lambda spec, gate: litgpt(spec, gate, compiled=False),
    "litgpt, windows, compiled": lambda spec, gate: litgpt(spec, gate, compiled=True),
}
# Run where --cases names them: what activation checkpointing costs and saves
MORE: dict[str, Callable[[dict, Gate], None]] = {
    f"recomputing {again}, packed{', compiled' * compiled}": partial(ours, packing="pack", compiled=compiled, again=again)
    for compiled in (False, True)
    for again in ("selective", "whole")
}


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    asked = json.loads(sys.argv[1])
    (CASES | MORE)[asked["case"]](asked, Gate(asked))
