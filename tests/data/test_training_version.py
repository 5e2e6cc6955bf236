"""Templates that rewrite earlier answers, never end an answer, or leave its end token out of their marks: what rows are
encoded as.

LM_STOCK_TEMPLATES=DIR names a folder with the stock templates (*.jinja) of models: those that are known are verified
too. Most are in trl/chat_templates of https://github.com/huggingface/trl and in models/templates of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from template_fixtures import ChatTemplate, decode_loss_spans

from data.tokenize import training_version
from data.tokenize.jinja_sandbox import compile_template
from data.tokenize.tokenizer import Tokenizer
from data.tokenize.train import MIN_VOCAB_SIZE, train_bpe
from data.tokenize.training_version import TRAINING_VERSIONS, TrainingVersion, apply_edits, template_sha256
from data.types import BadRowError

QUESTION, FOLLOW_UP, THIRD = ({"role": "user", "content": text} for text in ("2 + 2?", "And 3 + 3?", "Thanks?"))
FOUR, SIX = (
    {"role": "assistant", "content": "four", "reasoning_content": "two and two"},
    {"role": "assistant", "content": "six", "reasoning_content": "again"},
)
PLAIN_FOUR, PLAIN_SIX = {"role": "assistant", "content": "four"}, {"role": "assistant", "content": "six"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}
RESULT = {"role": "tool", "content": "4"}

# Like Qwen3: an answer before the last question loses its think block; the last one always has one.
QWEN3 = """{%- set ns = namespace(last_query_index=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last_query_index = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- set reasoning_content = message.reasoning_content or '' %}
    {%- if message.role == 'assistant' and loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
        {{- '<|im_start|>assistant\n<think>\n' + reasoning_content + '\n</think>\n\n' + message.content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Like DeepSeek-R1: no answer keeps its reasoning, and the generation prompt opens a think block.
R1 = r"""{{ bos_token }}{%- for message in messages %}{% set content = message['content'] %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + content }}{% else %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""
# Like GLM-4.5: the role of the next message ends an answer.
GLM = """{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user_index = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}{% else %}{{ '<|' + m.role + '|>\n' }}{% endif %}
    {%- if m.role == 'assistant' %}
        {{- '<think>' + (m.reasoning_content if loop.index0 > ns.last_user_index and m.reasoning_content else '') + '</think>' }}
        {%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
    {%- endif %}
    {%- if m.role != 'tool' %}{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIKE = {"Qwen3": QWEN3, "DeepSeek-R1": R1, "GLM-4.5": GLM}

Load = Callable[..., ChatTemplate]


@pytest.fixture(scope="module")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    train_bpe(["two and two are four"], MIN_VOCAB_SIZE, folder)
    return folder


@pytest.fixture
def load(tmp_path: Path, small_tokenizer: Path) -> Load:
    """`load(source)`: a ChatTemplate of a tokenizer with the control tokens that `source` names."""

    def load(source: str, bos: str = "<|im_start|>", eos: str = "<|im_end|>") -> ChatTemplate:
        folder = shutil.copytree(small_tokenizer, tmp_path / template_sha256(source)[:8], dirs_exist_ok=True)
        stored = json.loads((small_tokenizer / "tokenizer.json").read_text())
        known = {token["content"] for token in stored["added_tokens"]}
        roles = {"<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"} if "'<|' + " in source else set()
        found = {
            *re.findall(r"<[|｜][^<>{}'\"\\]{1,40}[|｜]>|</?(?:think|tool_call)>|\[gMASK\]|<sop>", source),
            bos,
            eos,
            *roles,
        } - known
        for number, token in enumerate(sorted(found), len(stored["model"]["vocab"])):
            stored["added_tokens"].append(
                {
                    **stored["added_tokens"][0],
                    "id": number,
                    "content": token,
                    "special": not re.fullmatch(r"</?\w{2,}>", token),
                }
            )
        config = json.loads((small_tokenizer / "tokenizer_config.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(stored))
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": bos, "eos_token": eos}))
        (folder / "chat_template.jinja").write_text(source)
        return ChatTemplate(Tokenizer.load(folder))

    return load


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the templates above stock templates of the versions of the models that they are like."""
    versions = [
        version._replace(stock=tuple(template_sha256(source) for name, source in LIKE.items() if name in version.name))
        for version in TRAINING_VERSIONS
    ]
    monkeypatch.setattr(training_version, "TRAINING_VERSIONS", versions)


def texts_with_loss(
    template: ChatTemplate, messages: list[dict], tools: list[dict] | None = None, loss_on: str = "assistant"
) -> list[str]:
    return decode_loss_spans(template.tokenizer, *template.encode(messages, tools, loss_on=loss_on))


def rendered(template: ChatTemplate, messages: list[dict]) -> str:
    return template.tokenizer.decode(template.encode(messages)[0], skip_special=False)


def stock_text(template: ChatTemplate, messages: list[dict]) -> str:
    return compile_template(str(template.tokenizer.chat_template))(
        messages=messages, add_generation_prompt=False, **template.tokenizer.named_tokens
    )


def test_unknown_template_that_rewrites_earlier_answers_is_refused(load: Load) -> None:
    with pytest.raises(BadRowError, match="changes earlier text") as error:
        load(QWEN3).encode([QUESTION, FOUR, FOLLOW_UP, SIX])
    assert "data.loss_on=last_assistant" in error.value.fix and "{% generation %}" in error.value.fix


@pytest.mark.usefixtures("known")
def test_qwen3_trains_all_answers_as_they_were_generated(load: Load) -> None:
    template = load(QWEN3)
    spans = ["<think>\ntwo and two\n</think>\n\nfour<|im_end|>", "<think>\nagain\n</think>\n\nsix<|im_end|>"]
    assert texts_with_loss(template, [QUESTION, FOUR, FOLLOW_UP, SIX]) == spans
    assert texts_with_loss(template, [QUESTION, FOUR, FOLLOW_UP, SIX], loss_on="last_assistant") == spans[1:]
    assert "Qwen3" in (template.version_note or "")


@pytest.mark.usefixtures("known")
def test_deepseek_r1_trains_reasoning_after_the_generation_prompt(load: Load) -> None:
    template = load(R1)
    assert texts_with_loss(template, [QUESTION, FOUR, FOLLOW_UP, PLAIN_SIX]) == [
        "two and two\n</think>\n\nfour<|im_end|>",
        "six<|im_end|>",
    ]
    in_content = {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\nfour"}
    assert template.encode([QUESTION, in_content]) == template.encode([QUESTION, FOUR])
    ids, loss_mask = template.encode([QUESTION, FOUR])
    assert template.encode_prompt([QUESTION]) == ids[: loss_mask.index(True)]


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("name", LIKE)
def test_training_version_keeps_the_text_of_the_stock_template(load: Load, name: str) -> None:
    check_version(load(LIKE[name]))


@pytest.mark.usefixtures("known")
def test_prompt_of_a_known_template_is_that_of_transformers(load: Load) -> None:
    transformers = pytest.importorskip("transformers")
    template = load(QWEN3)
    reference = transformers.AutoTokenizer.from_pretrained(template.tokenizer.folder)
    messages = [QUESTION, FOUR, FOLLOW_UP]
    assert reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    ) == template.encode_prompt(messages)


def check_version(template: ChatTemplate) -> None:
    """The text of one answer, and of the last of two, is the stock template's; earlier answers are as when they were
    the last; no other text has loss.
    """
    ended = template.turn_end.token if template.turn_end.added_after == "last" else ""
    keeps_reasoning = "two and two" in stock_text(template, [QUESTION, FOUR])
    for first, second in ((PLAIN_FOUR, PLAIN_SIX), *([(FOUR, SIX), (FOUR, PLAIN_SIX)] if keeps_reasoning else [])):
        one, two = [QUESTION, first], [QUESTION, first, FOLLOW_UP, second]
        assert rendered(template, one) == stock_text(template, one) + ended
        last_turn = stock_text(template, two).partition("And 3 + 3?")[2]
        assert rendered(template, two).endswith(last_turn + ended)
        assert rendered(template, two).startswith(rendered(template, one))
        spans = texts_with_loss(template, two)
        assert spans[:1] == texts_with_loss(template, one) and len(spans) == 2
        assert [content in span for content, span in zip(("four", "six"), spans, strict=True)] == [True, True]
        assert all(
            span.rstrip().endswith((template.turn_end.token, template.tokenizer.named_tokens["eos_token"]))
            for span in spans
        )
        assert not any("2 + 2" in span or "3 + 3" in span for span in spans)


@pytest.mark.parametrize("version", TRAINING_VERSIONS, ids=lambda version: version.name)
def test_training_versions_are_known_by_distinct_hashes(version: TrainingVersion) -> None:
    assert all(re.fullmatch(r"[0-9a-f]{64}", sha256) for sha256 in version.stock) and version.edits
    assert sum(sha256 in other.stock for other in TRAINING_VERSIONS for sha256 in version.stock) == len(version.stock)


def test_template_hash_ignores_line_ends_and_the_last_one() -> None:
    assert template_sha256("a\r\nb\n") == template_sha256("a\nb") != template_sha256("a\nb ")


STOCK = sorted(Path(os.environ["LM_STOCK_TEMPLATES"]).rglob("*.jinja")) if "LM_STOCK_TEMPLATES" in os.environ else []
KNOWN_STOCK = [path for path in STOCK if training_version.training_version(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", KNOWN_STOCK, ids=lambda path: path.stem)
def test_stock_template_has_a_verified_training_version(load: Load, path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    version = training_version.training_version(source)
    assert (
        version
        and all(expression in source for expression, _ in version.edits)
        and apply_edits(source, version) != source
    )
    eos = next(
        token
        for token in ("<｜end▁of▁sentence｜>", "<|im_end|>", "<|endoftext|>")
        if token in source or token == "<|endoftext|>"
    )
    check_version(load(source, bos="<｜begin▁of▁sentence｜>" if "｜" in eos else "<|im_start|>", eos=eos))


@pytest.mark.usefixtures("known")
def test_glm_ends_answers_with_the_role_of_the_next_message(load: Load) -> None:
    template = load(GLM, eos="<|endoftext|>")
    assert texts_with_loss(template, [QUESTION, FOUR, FOLLOW_UP, SIX]) == [
        "<think>two and two</think>four<|user|>",
        "<think>again</think>six<|user|>",
    ]
    assert texts_with_loss(template, [QUESTION, CALL, RESULT, PLAIN_FOUR]) == [
        "<think></think><tool_call>add</tool_call><|observation|>", "<think></think>four<|user|>"
    ]  # fmt: skip
    assert texts_with_loss(template, [QUESTION, CALL]) == ["<think></think><tool_call>add</tool_call><|observation|>"]
    assert template.stop_ids == sorted([template.tokenizer.eos_id, template.tokenizer.control_ids["<|user|>"]])
    assert "<|user|>" in (template.turn_end.note or "")


def test_template_of_plain_text_gets_an_end_token_after_every_answer(load: Load) -> None:
    template = load(PLAIN)
    messages = [QUESTION, PLAIN_FOUR, FOLLOW_UP, PLAIN_SIX]
    assert texts_with_loss(template, messages) == [" four<|im_end|>", " six<|im_end|>"]
    assert (
        rendered(template, messages)
        == "user: 2 + 2?\nassistant: four<|im_end|>\nuser: And 3 + 3?\nassistant: six<|im_end|>\n"
    )
    assert "<|im_end|> is added" in (template.turn_end.note or "")
    ids, loss_mask = template.encode(messages)
    assert (
        template.encode_prompt(messages[:3])
        == ids[: len(ids) - loss_mask[::-1].index(True) - len(template.tokenizer.encode(" six")) - 1]
    )


def test_end_token_outside_the_marks_has_loss(load: Load) -> None:
    template = load(MARKED)
    messages = [QUESTION, PLAIN_FOUR, FOLLOW_UP, PLAIN_SIX]
    assert texts_with_loss(template, messages) == ["four<|im_end|>", "six<|im_end|>"]
    assert texts_with_loss(template, messages, loss_on="last_assistant") == ["six<|im_end|>"]
    assert rendered(template, messages) == stock_text(template, messages).replace("\ufdd1", "").replace("\ufdd2", "")
    assert "leave out <|im_end|>" in (template.turn_end.note or "")


@pytest.mark.parametrize("source", [PLAIN, MARKED, GLM])
def test_choice_of_turns_with_loss_changes_no_token_of_an_unended_template(load: Load, source: str) -> None:
    template = load(source)
    messages = [QUESTION, PLAIN_FOUR, FOLLOW_UP, PLAIN_SIX]
    unweighted = [QUESTION, {**PLAIN_FOUR, "weight": 0}, FOLLOW_UP, PLAIN_SIX]
    every = {
        tuple(template.encode(chat, loss_on=turns)[0])
        for chat in (messages, unweighted)
        for turns in ("assistant", "last_assistant", "all")
    }
    assert len(every) == 1
    ends = [0, *(end for end, _ in template.turn_ends(messages, None, "messages"))]
    assert all(
        message["content"] in rendered(template, messages)[start:stop]
        for message, start, stop in zip(messages, ends[:-1], ends[1:], strict=True)
    )


def test_template_that_ends_answers_is_left_alone(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(tokenizer)
    assert template.turn_end.is_trained and template.turn_end.note is None and template.version_note is None
    assert template.stop_ids == [tokenizer.eos_id]


def test_template_with_half_a_surrogate_pair_is_no_known_one() -> None:
    assert training_version.training_version("\ud800{{ messages }}") is None
