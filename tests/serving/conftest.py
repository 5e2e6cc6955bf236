"""`trained`: a small random model with a chat template; `queue`: the thread that generates with it; `http`: a client of
the application in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models.families.decoder import DecoderConfig
from models.formats.save import save_model
from models.language_model import create_model
from runner.inference.load import LoadedModel, load_trained

TOKENIZER = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields: dict[str, Any] = {
        **{
            "family": "decoder",
            "name": "small",
            "vocab_size": 6400,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        **{
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 64,
            "max_position_embeddings": 256,
            "rope_theta": 1e6,
            "rope_scaling": None,
        },
        **{
            "rms_norm_eps": 1e-6,
            "qk_norm": True,
            "attention_bias": False,
            "attention_out_bias": False,
            "mlp_bias": False,
            "dropout": 0.0,
        },
        **{
            "tie_word_embeddings": True,
            "attention": "auto",
            "num_experts": 0,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 0,
        },
        **{"norm_topk_prob": False, "router_aux_loss_coef": 0.0},
    }
    torch.manual_seed(0)
    model = create_model(DecoderConfig(**fields))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("served") / "small"
    save_model(folder, model, model.cfg, TOKENIZER)
    return folder


@pytest.fixture(scope="session")
def trained(served_folder: Path) -> LoadedModel:
    return load_trained(served_folder, "cpu")


@pytest.fixture(scope="session")
def queue(trained: LoadedModel) -> Iterator[Any]:
    pytest.importorskip("uvicorn", reason="part of the extra serve")
    from runner.serving.app import GenerationQueue

    queue = GenerationQueue(trained, max_batch=4, max_waiting=100)
    yield queue
    queue.close()


@pytest.fixture(scope="session")
def http(queue: Any) -> Iterator[Any]:
    pytest.importorskip("starlette", reason="part of the extra serve")
    from starlette.testclient import TestClient

    from runner.serving.app import create_app

    with TestClient(
        create_app(queue, "small", 16, None, ["localhost", "127.0.0.1", "[::1]", "::1"]), base_url="http://localhost"
    ) as client:
        yield client
