"""Batches against the rows they are made of, token by token."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from row_fixtures import make_loader

from data.batching.batch import IGNORE_INDEX, PADDING, collate
from data.types import EncodedRow, TokenSequence

CHOSEN = TokenSequence(np.array([1, 5, 6, 7], np.int32), np.array([False, False, True, True]))
REJECTED = TokenSequence(np.array([1, 5, 8], np.int32), np.array([False, False, True]))
OTHER = TokenSequence(np.array([1, 9, 2, 3, 4], np.int32), np.array([False, True, False, False, True]))
NONE = IGNORE_INDEX


def row(*sequences: TokenSequence) -> EncodedRow:
    return EncodedRow(sequences, "row")


def test_batch_label_is_the_next_token_where_that_token_has_loss() -> None:
    batch = collate([[row(CHOSEN)], [row(OTHER)]], pad_id=0, packed=False)
    assert batch.input_ids[:, :4].tolist() == [[1, 5, 6, 0], [1, 9, 2, 3]]
    assert batch.labels[:, :4].tolist() == [[NONE, 6, 7, NONE], [9, NONE, NONE, 4]]
    assert batch.lengths.tolist() == [3, 4] and batch.num_tokens == 7 and batch.num_supervised_tokens == 4


def test_packed_batch_starts_positions_and_documents_again_in_each_row() -> None:
    batch = collate([[row(CHOSEN), row(OTHER)]], pad_id=0, packed=True)
    assert batch.input_ids[0].tolist() == [1, 5, 6, 1, 9, 2, 3, 0] and batch.labels[0].tolist() == [
        NONE,
        6,
        7,
        9,
        NONE,
        NONE,
        4,
        NONE,
    ]
    assert batch.document_ids is not None and batch.document_ids[0].tolist() == [0, 0, 0, 1, 1, 1, 1, PADDING]
    assert batch.position_ids is not None and batch.position_ids[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("packed", [False, True])
def test_batch_of_pairs_has_the_chosen_sequences_first(packed: bool) -> None:
    batch = collate([[row(CHOSEN, REJECTED)], [row(REJECTED, CHOSEN)]], pad_id=0, packed=packed)
    assert batch.lengths.tolist() == [3, 2, 2, 3]  # chosen of both pairs, then rejected of both
    labels = np.where(batch.labels.numpy() == NONE, 0, batch.labels.numpy())
    assert batch.sum_per_document(batch.labels.new_tensor(labels)).tolist() == [13, 8, 8, 13]


WEIGHTED = TokenSequence(OTHER.ids, np.array([0, 0.5, 0, 0, 3], np.float32))


@pytest.mark.parametrize("packed", [False, True])
def test_batch_has_loss_weights_where_a_row_has_some(packed: bool) -> None:
    assert collate([[row(CHOSEN)], [row(OTHER)]], pad_id=0, packed=packed).loss_weights is None
    batch = collate(
        [[row(CHOSEN), row(WEIGHTED)]] if packed else [[row(CHOSEN)], [row(WEIGHTED)]], pad_id=0, packed=packed
    )
    plain = collate([[row(CHOSEN), row(OTHER)]] if packed else [[row(CHOSEN)], [row(OTHER)]], pad_id=0, packed=packed)
    assert (
        batch.loss_weights is not None
        and batch.loss_weights.dtype == torch.float32
        and torch.equal(batch.labels, plain.labels)
    )
    assert (
        batch.loss_weights[batch.labels != NONE].tolist() == [1, 1, 0.5, 3]
        and not batch.loss_weights[batch.labels == NONE].any()
    )
    assert batch.num_supervised_tokens == 4
    for copied in (pickle.loads(pickle.dumps(batch)), batch.to(torch.device("cpu"))):
        assert (
            copied.loss_weights is not None
            and torch.equal(copied.loss_weights, batch.loss_weights)
            and copied.names == batch.names
        )
    assert batch.as_dummy().loss_weights is None and batch.as_dummy().num_supervised_tokens == 0
    assert pickle.loads(pickle.dumps(plain)).loss_weights is None
    assert len(pickle.dumps(plain)) < len(pickle.dumps(batch))


class Numbered:
    """Sequences of five rows; sequence i is the (i % 5)-th of epoch i // 5, as in packing."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> list[EncodedRow]:
        return [EncodedRow((CHOSEN,), f"sequence {i}")]


def test_loader_reads_the_sequences_of_its_epoch() -> None:
    loader = make_loader(Numbered(), batch_size=2)  # the sampler needs no rows
    for epoch in (0, 1, 2):
        names = [name for batches in loader.iter_epoch(epoch) for batch in batches for name in batch.names]
        assert sorted(names) == [f"sequence {5 * epoch + i}" for i in range(5)]
