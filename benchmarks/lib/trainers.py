"""Other people's trainers, each driven step by step by the batches it is given (see speed_cases.py)."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.cases import Count, Gate, forever, run_of

ROOT = Path(__file__).parents[2]
UNMASKED = -100


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
    source = source.replace("loader = DataLoader(", "loader = GATED(").replace("def train_epoch(", "from lib.trainers import GATED\n\n\ndef train_epoch(", 1)
    place = Path(tempfile.mkdtemp()) / "trainer"
    place.mkdir()
    (place / "script.py").write_text(source, encoding="utf-8")
    sys.path[:0] = [str(Path(spec["minimind"])), str(ROOT / "benchmarks")]
    from lib import trainers

    def count(batch: Any) -> tuple[int, int, list[int]]:
        ids = batch[0]
        return int((ids != spec["pad_id"]).sum()), ids.numel(), [ids.shape[1]] * len(ids)

    def gated(dataset: Any, **words: Any) -> Loader:
        from torch.utils.data import DataLoader

        return Loader(DataLoader(dataset, **words), gate, count)

    trainers.GATED = gated
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


def nanochat(spec: dict, gate: Gate, compiled: bool) -> None:
    """Its own architecture in the width and depth asked for, and its own optimizer: no other model fits its loop."""
    os.environ["NANOCHAT_DTYPE"] = {"fp32": "float32", "bf16": "bfloat16"}[spec["precision"]]
    sys.path.insert(0, spec["nanochat"])
    import torch
    from nanochat.gpt import GPT, GPTConfig

    shape = spec["model"]
    torch.manual_seed(0)
    model: Any = GPT(GPTConfig(
        sequence_len=spec["length"], vocab_size=shape["vocab_size"], n_layer=shape["num_hidden_layers"], n_head=shape["num_attention_heads"],
        n_kv_head=shape["num_key_value_heads"], n_embd=shape["hidden_size"], window_pattern="L",
    ))  # fmt: skip
    model.init_weights()
    spec["parameters"] = model.num_matmul_params()
    optimizer = model.setup_optimizer()
    forward = torch.compile(model, dynamic=False) if compiled else model
    data = torch.tensor(windows(spec))
    for lines in gate.through(forever([{"input_ids": part} for part in data.split(spec["lines"]) if len(part) == spec["lines"]]), all_of):
        ids = lines["input_ids"]
        forward(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
