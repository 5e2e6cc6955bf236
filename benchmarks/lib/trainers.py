"""Other trainers, each driven by the batches it is given (cases.Gate).

Their packages are imported in the process that measures them.
"""

from __future__ import annotations

import importlib.util
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

from lib.cases import BatchCount, CountFunction, Gate, forever

CHECKOUTS = {"MiniMind's": "minimind", "litgpt,": "litgpt", "nanochat,": "nanochat"}
PACKAGES = {"HF": ("transformers", "accelerate"), "TRL": ("transformers", "trl", "datasets")}
IGNORE_INDEX = -100
MAX_STEPS = 1_000_000  # more than are measured


def why_left_out(case: str, checkouts: dict[str, str | None]) -> str | None:
    """Return why a case cannot run: its trainer is not installed, or its checkout not given; None if it can."""
    trainer = case.split()[0]
    if (flag := CHECKOUTS.get(trainer)) and not checkouts.get(flag):
        return f"no checkout given: --{flag} PATH"
    missing = [package for package in PACKAGES.get(trainer, ()) if importlib.util.find_spec(package) is None]
    return f"{', '.join(missing)} not installed: pip install lm-runner[bench]" if missing else None


def equal_lengths(spec: dict) -> list[list[int]]:
    """Return all rows concatenated and cut into sequences of equal length: how these trainers pack."""
    import numpy as np

    tokens, length = np.load(spec["tokens"]).tolist(), spec["length"]
    return [tokens[start : start + length] for start in range(0, len(tokens) - length, length)]


def count_all(batch: dict) -> BatchCount:
    rows, length = batch["input_ids"].shape
    return BatchCount(rows * length, rows * length, [length] * rows)


def transformers_model(spec: dict) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    names = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "rms_norm_eps",
    )
    settings = {name: spec["model"][name] for name in names}
    return Qwen3ForCausalLM(
        Qwen3Config(
            **settings, tie_word_embeddings=True, rope_theta=1e6, max_position_embeddings=32768, use_cache=False
        )
    )


def device_of(spec: dict) -> str:
    """Return cuda or cpu."""
    import torch

    return spec.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")


def training_arguments(spec: dict, compiled: bool) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": spec["rows"],
        "max_steps": MAX_STEPS,
        "bf16": spec["precision"] == "bf16",
        "torch_compile": compiled,
        "use_cpu": device_of(spec) == "cpu",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 50,
        "optim": "adamw_torch_fused",
        "disable_tqdm": True,
    }


class GatedLoader:
    """A DataLoader whose batches pass a gate, repeated without end."""

    def __init__(self, loader: Any, gate: Gate, count: CountFunction) -> None:
        self.loader, self.gate, self.count = loader, gate, count

    def __len__(self) -> int:
        return MAX_STEPS

    def __iter__(self) -> Iterator:
        return self.gate.through(forever(self.loader), self.count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def hf(spec: dict, gate: Gate, compiled: bool) -> None:
    from transformers import Trainer, TrainingArguments

    class GatedTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return GatedLoader(super().get_train_dataloader(), gate, count_all)

    rows = [{"input_ids": ids, "labels": ids} for ids in equal_lengths(spec)]
    arguments = TrainingArguments(**training_arguments(spec, compiled))
    GatedTrainer(model=transformers_model(spec), args=arguments, train_dataset=rows).train()  # type: ignore[arg-type]  # a list serves as a dataset


def trl(spec: dict, gate: Gate, packing: bool) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    def count(batch: dict) -> BatchCount:
        rows, length = batch["input_ids"].shape
        mask = batch.get("attention_mask")
        useful = int((batch["labels"] != IGNORE_INDEX).sum()) if mask is None else int(mask.sum())
        return BatchCount(useful, rows * length, [length] * rows)

    class GatedTrainer(SFTTrainer):
        def get_train_dataloader(self) -> Any:
            return GatedLoader(super().get_train_dataloader(), gate, count)

    rows = Dataset.from_list([json.loads(line) for line in Path(spec["files"]["messages"]).read_text().splitlines()])
    settings = SFTConfig(
        **training_arguments(spec, False), max_length=spec["length"], packing=packing, gradient_checkpointing=False
    )
    tokenizer = AutoTokenizer.from_pretrained(spec["tokenizer"])
    GatedTrainer(model=transformers_model(spec), args=settings, train_dataset=rows, processing_class=tokenizer).train()


def minimind(spec: dict, gate: Gate) -> None:
    """Its own script, changed in the shape of the model, the source of tokenizer and weights, autocast on a CPU, and
    the data loader.
    """
    script = (
        Path(spec["minimind"])
        / "trainer"
        / ("train_pretrain.py" if spec["stage"] == "pretrain" else "train_full_sft.py")
    )
    source = script.read_text(encoding="utf-8")
    if spec["precision"] == "bf16":
        source = source.replace('nullcontext() if device_type == "cpu"', "torch.autocast(device_type, dtype) if True")
    shape = {name: spec["model"][name] for name in ("num_key_value_heads", "intermediate_size", "vocab_size")}
    source = source.replace("MiniMindConfig(hidden_size", f"MiniMindConfig(**{shape}, hidden_size")
    source = source.replace(
        "init_model(lm_config, ", f"init_model(lm_config, tokenizer_path={spec['tokenizer']!r}, from_weight="
    )
    source = re.sub(r"from_weight=args\.from_weight", "from_weight='none'", source)
    source = source.replace("loader = DataLoader(", "loader = gated_loader(")
    folder = Path(tempfile.mkdtemp()) / "trainer"  # the script uses paths relative to ../
    folder.mkdir()
    (folder / "script.py").write_text(source, encoding="utf-8")
    sys.path.insert(0, spec["minimind"])

    def count(batch: Any) -> BatchCount:
        ids = batch[0]
        return BatchCount(int((ids != spec["pad_id"]).sum()), ids.numel(), [ids.shape[1]] * len(ids))

    def gated_loader(dataset: Any, **settings: Any) -> GatedLoader:
        from torch.utils.data import DataLoader

        return GatedLoader(DataLoader(dataset, **settings), gate, count)

    os.chdir(folder)
    sys.argv = [
        "script.py", "--data_path", spec["files"]["minimind"], "--batch_size", str(spec["rows"]), "--max_seq_len", str(spec["length"]), "--accumulation_steps", "1",
        "--hidden_size", str(spec["model"]["hidden_size"]), "--num_hidden_layers", str(spec["model"]["num_hidden_layers"]), "--num_workers", "0",
        "--dtype", "bfloat16", "--save_interval", "100000000",
    ]  # fmt: skip
    runpy.run_path("script.py", init_globals={"gated_loader": gated_loader}, run_name="__main__")


def tensor_batches(spec: dict, gate: Gate) -> Iterator[Any]:
    """Yield tensors of token ids of equal length (rows, length), through the gate."""
    import torch

    batches = [
        {"input_ids": ids} for ids in torch.tensor(equal_lengths(spec)).split(spec["rows"]) if len(ids) == spec["rows"]
    ]
    for batch in gate.through(forever(batches), count_all):
        yield batch["input_ids"].to(device_of(spec))


def litgpt(spec: dict, gate: Gate, compiled: bool) -> None:
    """Its model in the loop of its recipe: fused AdamW, gradient clipping, cross-entropy over the whole sequence."""
    import torch

    # Its package imports Lightning, which its model does not need: two empty modules replace the imports.
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
    model.to(device_of(spec))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model) if compiled else model
    for ids in tensor_batches(spec, gate):
        with torch.autocast(device_of(spec), torch.bfloat16, enabled=spec["precision"] == "bf16"):
            loss = torch.nn.functional.cross_entropy(forward(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def nanochat(spec: dict, gate: Gate, compiled: bool) -> None:
    """Its own architecture in the same width and depth, with its own optimizer: its loop takes no other model."""
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
    model.to(device_of(spec)).init_weights()
    spec["parameters"] = model.num_matmul_params()
    optimizer = model.setup_optimizer()
    forward = torch.compile(model, dynamic=False) if compiled else model
    for ids in tensor_batches(spec, gate):
        forward(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
