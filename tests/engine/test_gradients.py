"""Loss and gradient of one accumulated step on packed rows, beside the model of transformers and torch on each row
alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from row_fixtures import RandomRows
from tiny_models import TOKENIZER
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from data.batching.batch import Batch, collate
from data.types import TokenSequence
from models.formats.load import load_model
from models.language_model import LanguageModel
from runner.engine.objectives.config import NextToken
from runner.engine.objectives.dpo import Dpo
from runner.engine.objectives.objective import Objective, Reference

VOCABULARY = 96
SIZES = {
    **{
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    **{"head_dim": 8, "max_position_embeddings": 128, "attention_dropout": 0.0, "initializer_range": 0.2},
    # an embedding of transformers has no gradient for the padding token
    **{"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True}
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 16},
}
PATHS = [
    (name, family)
    for name in FAMILIES
    for family in ("decoder", "transformers")
    if (name, family) != ("gemma3_text", "decoder")
]
MICRO_BATCHES = ([[0, 3], [1, 4]], [[2, 5, 6]])  # rows in each packed sequence: 4 rows, then 3
LENGTHS = [5, 17, 9, 20, 12, 3, 16]
BETA = 0.3
TOLERANCE = 1e-5  # of the loss, and of each gradient relative to its largest number


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SIZES | FAMILIES[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def plain_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()


def own_model(folder: Path, family: str) -> LanguageModel:
    model = load_model(folder, family)
    assert model.cfg.family == family
    model.prepare(is_packed=True)
    return model.train()


def nll_of_sequences(model: PreTrainedModel, rows: RandomRows) -> list[list[torch.Tensor]]:
    """Return the loss of each token with a label, of each sequence of each row, each computed alone."""
    batches = [collate([[rows[i]]], pad_id=0, packed=False) for i in range(len(rows))]
    return [
        [
            F.cross_entropy(model(ids[None, :length]).logits[0], labels[:length], reduction="none", ignore_index=-100)
            for ids, labels, length in zip(batch.input_ids, batch.labels, batch.lengths.tolist(), strict=True)
        ]
        for batch in batches
    ]


def accumulated_step(model: LanguageModel, objective: Objective, batches: list[Batch]) -> float:
    """Run the backward passes of a step whose losses are divided by the items of all micro-batches; return the loss."""
    items = sum(objective.count(batch) for batch in batches)
    losses = [objective.loss(model, batch)["loss"] / items for batch in batches]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses)


def check_gradients(model: LanguageModel, plain: PreTrainedModel) -> None:
    expected = {name: p.grad for name, p in plain.named_parameters()}
    own = {name: p.grad for name, p in model.named_parameters()}
    assert own.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (own[name] - gradient).abs().max() <= TOLERANCE * gradient.abs().max(), name


def trained_pair(folder: Path, family: str) -> tuple[LanguageModel, PreTrainedModel]:
    """Return our model and that of transformers with the same weights, which differ from those in the folder: at the
    reference, the loss of DPO is constant.
    """
    model, plain = own_model(folder, family), plain_model(folder)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p += 0.1 * torch.randn_like(p)
            model.get_parameter(name).copy_(p)
    return model, plain


def packed_batches(rows: RandomRows) -> list[Batch]:
    return [
        collate([[rows[i] for i in sequence] for sequence in micro_batch], pad_id=0, packed=True)
        for micro_batch in MICRO_BATCHES
    ]


@pytest.mark.parametrize("folder, family", PATHS, indirect=["folder"])
def test_gradients_of_an_accumulated_sft_step_equal_plain_transformers(folder: Path, family: str) -> None:
    rows = RandomRows(LENGTHS, vocab_size=VOCABULARY)
    model, plain = own_model(folder, family), plain_model(folder)
    loss = accumulated_step(model, NextToken(), packed_batches(rows))
    tokens = torch.cat([nll for row in nll_of_sequences(plain, rows) for nll in row])
    expected = tokens.sum() / (tokens != 0).sum()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=TOLERANCE)
    check_gradients(model, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder, family",
    [("qwen3", "decoder"), ("llama", "transformers"), ("gemma3_text", "transformers")],
    indirect=["folder"],
)
def test_gradients_of_an_accumulated_dpo_step_equal_plain_transformers(folder: Path, family: str) -> None:
    rows = RandomRows(LENGTHS, sequences_per_row=2, vocab_size=VOCABULARY)
    model, plain = trained_pair(folder, family)
    loss = accumulated_step(model, Dpo(BETA, Reference(own_model(folder, family))), packed_batches(rows))
    with torch.no_grad():
        fixed_nll = nll_of_sequences(plain_model(folder), rows)
    margins = []
    for (chosen, rejected), (fixed_chosen, fixed_rejected) in zip(
        nll_of_sequences(plain, rows), fixed_nll, strict=True
    ):
        margins.append((fixed_chosen - chosen).sum() - (fixed_rejected - rejected).sum())
    expected = -F.logsigmoid(BETA * torch.stack(margins)).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=TOLERANCE)
    check_gradients(model, plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("folder, family", [("qwen3", "decoder"), ("llama", "transformers")], indirect=["folder"])
def test_gradients_of_an_accumulated_dpo_step_are_those_of_trl(folder: Path, family: str, loss_type: str) -> None:
    """Measured with trl 1.16: losses differ by at most 1.0e-6 of their size, gradients by at most 2.0e-6 of the largest
    number.
    """
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from transformers import PreTrainedTokenizerFast

    rows = RandomRows(LENGTHS, sequences_per_row=2, vocab_size=VOCABULARY)
    model, plain = trained_pair(folder, family)
    loss = accumulated_step(model, Dpo(BETA, Reference(own_model(folder, family)), loss_type), packed_batches(rows))
    # not used: the loss gets the rows above
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    arguments = trl.DPOConfig(
        str(folder),
        beta=BETA,
        loss_type=[loss_type],
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
    )
    trainer = trl.DPOTrainer(
        plain,
        plain_model(folder),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"chosen": turns, "rejected": turns}]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(TOKENIZER),
    )
    pairs = [rows[i].sequences for i in range(len(rows))]
    sequences = [pair[side] for side in (0, 1) for pair in pairs]
    expected = trainer._compute_loss(
        plain, {name: padded(sequences, name) for name in ("input_ids", "attention_mask", "completion_mask")}, False
    )
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=TOLERANCE)
    check_gradients(model, plain)


def padded(sequences: list[TokenSequence], name: str) -> torch.Tensor:
    """Return one of the inputs of TRL's loss, (sequences, tokens)."""
    values = {
        "input_ids": lambda s: s.ids,
        "attention_mask": lambda s: s.loss_mask | True,
        "completion_mask": lambda s: s.loss_mask,
    }[name]
    return torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(values(sequence)).long() for sequence in sequences], batch_first=True
    )
