"""serve.py: OpenAI's client gets the answers of chat.py and log-probabilities of the model; requests without a key, from a foreign page or unsupported ones are refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from data.tokenize.chat_template import ChatTemplate
from models.config import ModelConfig
from models.families.decoder import DecoderConfig
from models.formats.save import save_model
from models.generate import generate
from models.language_model import create_model
from runner.inference.load import LoadedModel, load_trained
from runner.serving.command import API_KEY, ServeConfig, serve
from runner.serving.generation import Answer, GenerationQueue, GenerationRequest, Sampling

openai = pytest.importorskip("openai", reason="the client of the interface; part of the extra dev")
uvicorn = pytest.importorskip("uvicorn", reason="part of the extra serve")

TOKENIZER = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"
KEY = "secret"
pytestmark = pytest.mark.slow
MESSAGES: list[Any] = [{"role": "user", "content": "Where does Tolo live?"}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("served") / "model"
    cfg: ModelConfig = DecoderConfig(
        **{"family": "decoder", "name": "small", "vocab_size": 6400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},  # type: ignore[arg-type]  # values of many types in one dict
        **{"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 128, "rope_theta": 1e6, "rope_scaling": None},  # type: ignore[arg-type]
        **{"rms_norm_eps": 1e-6, "qk_norm": True, "attention_bias": False, "attention_out_bias": False, "mlp_bias": False, "dropout": 0.0},  # type: ignore[arg-type]
        **{"tie_word_embeddings": True, "attention": "auto", "num_experts": 0, "num_experts_per_tok": 1, "moe_intermediate_size": 0},  # type: ignore[arg-type]
        **{"norm_topk_prob": False, "router_aux_loss_coef": 0.0},  # type: ignore[arg-type]
    )
    torch.manual_seed(0)
    model = create_model(cfg)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    save_model(folder, model, cfg, TOKENIZER)
    return load_trained(folder, "cpu")


@pytest.fixture(scope="module")
def client(trained: LoadedModel) -> Iterator[Any]:
    from runner.serving.app import create_app

    generation = GenerationQueue(trained, max_batch=4)
    app = create_app(generation, "small", 16, KEY, allowed_hosts=["127.0.0.1"])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
    server.should_exit = True
    thread.join(10)
    generation.close()


def greedy(trained: LoadedModel, ids: list[int], tokens: int) -> list[int]:
    stop_ids = list(trained.tokenizer.stop_ids)
    return generate(trained.model, [ids], max_new_tokens=tokens, temperature=0, top_k=0, top_p=1, repetition_penalty=1, stop_ids=stop_ids)[0]


def test_serve_answers_chats_as_the_model_does(client: Any, trained: LoadedModel) -> None:
    prompt = ChatTemplate(trained.tokenizer).encode_prompt(MESSAGES)
    expected = greedy(trained, prompt, 12)
    answer = client.chat.completions.create(model="small", messages=MESSAGES, temperature=0, max_tokens=12)
    assert answer.choices[0].message.content == trained.tokenizer.decode(expected)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(expected))
    assert [model.id for model in client.models.list()] == ["small"]


def test_serve_streams_the_same_text(client: Any) -> None:
    whole = client.chat.completions.create(model="small", messages=MESSAGES, temperature=0, max_tokens=12)
    chunks = list(
        client.chat.completions.create(model="small", messages=MESSAGES, temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_serve_ends_at_stop_texts_and_samples_by_seed(client: Any) -> None:
    whole = client.completions.create(model="small", prompt="Tolo", temperature=0, max_tokens=12).choices[0].text
    stopped = client.completions.create(model="small", prompt="Tolo", temperature=0, max_tokens=12, stop=[whole[5:8]]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(whole[5:8])], "stop")
    sampled = [client.completions.create(model="small", prompt="Tolo", seed=seed, max_tokens=12, n=2) for seed in (1, 1, 2)]
    texts = [[choice.text for choice in answer.choices] for answer in sampled]
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]


def test_serve_scores_prompts_as_the_model_does(client: Any, trained: LoadedModel) -> None:
    ids = trained.tokenizer.encode("Tolo lives in Hale. 托洛 🐐")
    choice = client.completions.create(model="small", prompt=ids, max_tokens=1, temperature=0, logprobs=2, echo=True).choices[0]
    log_probs = trained.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(log_probs[i, token]) for i, token in enumerate(ids[1:])]
    assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.tokens) == len(ids) + 1
    assert choice.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    assert max(choice.logprobs.top_logprobs[1].values()) == pytest.approx(float(log_probs[0].max()), abs=1e-4)


def test_serve_batches_greedy_requests_without_changing_them(trained: LoadedModel) -> None:
    prompts = [trained.tokenizer.encode(text) for text in ("Tolo", "Where does Mina live?", "米娜")]
    requests = [GenerationRequest([Answer(prompt, ())], Sampling(8, temperature=0, stop_ids=trained.tokenizer.stop_ids)) for prompt in prompts]
    generation = GenerationQueue(trained, max_batch=3)
    done = threading.Semaphore(0)
    sizes: list[int] = []
    generate_batch = generation._generate
    generation._generate = lambda batch: (sizes.append(len(batch)), generate_batch(batch))[1]  # type: ignore[method-assign]
    blocker = GenerationRequest([], Sampling(1), scored=[prompts[1] * 8])
    for request in (blocker, *requests):
        request.on_end = done.release
        generation.submit(request)
    for _ in range(4):
        assert done.acquire(timeout=60)
    generation.close()
    assert [request.answers[0].ids for request in requests] == [greedy(trained, prompt, 8) for prompt in prompts]
    assert sum(sizes) == 3


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        ({"prompt": "a", "presence_penalty": 1.0}, "presence_penalty is not supported"),
        ({"prompt": "a", "max_tokens": 1000}, "this model has 128 positions"),
        ({"prompt": [6400]}, "token ids must be in"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "stream": True, "echo": True}, "echo and logprobs are not supported with stream=true"),
    ],
)
def test_serve_refuses_what_it_does_not_answer(client: Any, request_body: dict, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model="small", **request_body)


def test_serve_refuses_messages_that_the_template_does_not_take(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="role must be one of"):
        client.chat.completions.create(model="small", messages=[{"role": "visitor", "content": "a"}])


def test_serve_needs_the_key_and_its_own_host_name(client: Any) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError):
        client.with_options(default_headers={"Host": "attacker.example"}).models.list()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host": "0.0.0.0"}, f"without a key other machines could use the model.*{API_KEY}"),
        ({"host": "no.such.host.invalid"}, "host is no address"),
        ({"port": 70000}, "port must be in"),
    ],
)
def test_serve_refuses_to_listen_where_others_could_use_it(trained: LoadedModel, monkeypatch: pytest.MonkeyPatch, changes: dict, message: str) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    values: dict = {"run": "x", "host": "127.0.0.1", "port": 0, "name": None, "max_batch": 1, "max_new_tokens": 8, "device": "cpu"} | changes
    with pytest.raises(UserError) as refused:
        serve(ServeConfig(**values), trained.folder)
    assert re.search(message, f"{refused.value.message} {refused.value.fix}")
