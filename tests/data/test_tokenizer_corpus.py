import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from data.config import TokenizerConfig
from data.sources.files import Source
from data.tokenize.tokenizer import Tokenizer
from data.tokenize.train import HOLDOUT_EVERY, CorpusStats, iter_corpus, measure_tokenizer, train_tokenizer

COMMAND = Path(__file__).parents[2] / "runner" / "tokenizer.py"
CATS = [{"text": f"the cat and the dog {number}"} for number in range(50)]


def run_command(*overrides, folder):
    return subprocess.run(
        [sys.executable, str(COMMAND), *overrides], cwd=folder, capture_output=True, text=True, timeout=500
    )


def config(**settings):
    return TokenizerConfig(
        **{
            "path": ["rows.jsonl"],
            "to": None,
            "vocab_size": 280,
            "max_lines": 500,
            "tokenizer": None,
            "compare": None,
            **settings,
        }
    )


@pytest.fixture
def cats(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write(CATS)


def test_corpus_has_the_strings_of_any_schema_without_roles(write):
    rows = [
        {"conversations": [{"role": "user", "content": "hi"}]},
        {"text": "held out"},
        {"instruction": "do", "input": "", "output": ["it"], "score": 5},
    ]
    stats = CorpusStats()
    assert list(iter_corpus([Source.open(write(rows))], 100, stats)) == ["hi", "do", "it"]
    assert [text for _, text in stats.held_out["rows.jsonl", "en"]] == ["held out"] and stats.rows == 2


def test_corpus_skips_fields_that_are_not_text(write):
    rows = [
        {"text": "first"},
        {"text": "held out"},
        {"text": "second", "url": "http://a.b/c", "timestamp": "2020"},
        {"note": "of no known schema"},
    ]
    assert list(iter_corpus([Source.open(write(rows))], 100, CorpusStats())) == [
        "first",
        "second",
        "of no known schema",
    ]


def test_corpus_counts_bad_and_empty_rows_and_names_the_first(write):
    stats = CorpusStats()
    path = write(b'{"text": "a"}\n{\n{"text": " "}\n{\n{"text": "b"}\n')
    assert list(iter_corpus([Source.open(path)], 100, stats)) == ["a"]
    assert stats.held_out == {("rows.jsonl", "en"): [(f"{path}:5", "b")]}
    assert stats.bad == {"invalid JSON": 2, "a row without text": 1}
    assert stats.first_seen["a row without text"] == f"{path}:3" and stats.first_seen["invalid JSON"].startswith(
        f"{path}:2"
    )


def test_corpus_limits_rows_per_file_and_reads_a_repeated_file_twice(write):
    path = write([{"text": str(number)} for number in range(100)])
    stats = CorpusStats()
    assert list(iter_corpus([Source.open(path)] * 2, 10, stats)) == ["0", *map(str, range(2, 10))] * 2
    assert stats.held_out == {("rows.jsonl", "en"): [(f"{path}:2", "1")]} and HOLDOUT_EVERY > 10


def test_corpus_holds_out_languages_separately(write):
    stats = CorpusStats()
    path = write([{"text": "a"}, {"conversations": [{"content": "今天天气 good"}, {"content": "A cup of 茶 please"}]}])
    list(iter_corpus([Source.open(path)], 10, stats))
    assert set(stats.held_out) == {("rows.jsonl", "zh"), ("rows.jsonl", "en")}


def test_tokenizer_report_counts_unknown_bytes_and_names_changed_texts(tokenizer):
    class WithoutAccents:
        vocab_size = 1

        def encode_batch(self, texts):
            return tokenizer.encode_batch([text.replace("é", "") for text in texts])

        def decode(self, ids, skip_special):
            return tokenizer.decode(ids, skip_special)

    held_out = {("a", "en"): [("a:1", "plain"), ("a:2", "café, fiancé")]}
    lossy, shipped = measure_tokenizer(WithoutAccents(), held_out), measure_tokenizer(tokenizer, held_out)
    titles = ("unknown bytes", "texts that decoding does not restore", "the first of them")
    assert [lossy[title] for title in titles] == ["4", "1", "a:2"]
    assert [shipped[title] for title in titles] == ["0", "0", ""]


@pytest.mark.slow
def test_tokenizer_command_trains_on_a_file_with_any_name(tmp_path):
    (tmp_path / "it's a, b.jsonl").write_bytes(b"\n".join(json.dumps(row).encode() for row in CATS) + b"\n{")
    result = run_command("path=it's a, b.jsonl", "to=new", "vocab_size=280", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (
        "tokens from 47 rows" in result.stdout
        and "characters per token" in result.stdout
        and "left out 1: truncated file" in result.stdout
    )
    assert Tokenizer.load(tmp_path / "new").vocab_size <= 280
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it's a, b.jsonl", "new"]


@pytest.mark.slow
def test_tokenizer_command_checks_all_files_before_it_trains(tmp_path):
    (tmp_path / "it's a, b.jsonl").write_text('{"text": "a"}\n')
    result = run_command('path=["it\'s a, b.jsonl",none.jsonl]', "to=new", "vocab_size=12", folder=tmp_path)
    assert result.returncode == 2 and "none.jsonl" in result.stderr and not (tmp_path / "new").exists()
    assert [line.split(":")[0].strip() for line in result.stderr.splitlines()] == ["error", "where", "fix"]


def test_tokenizer_training_reads_a_file_that_is_one_row(tmp_path, monkeypatch, capsys):
    """The first row was held out: a book gave a tokenizer of single bytes."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("the cat and the dog\n" * 50)
    train_tokenizer(config(path=["book.txt"], to="new"))
    assert capsys.readouterr().out.startswith("277 tokens from 1 rows")
    train_tokenizer(config(path=["book.txt"], tokenizer="new", to=None))
    assert "on 1 held-out texts" in capsys.readouterr().out


def test_tokenizer_training_refuses_files_without_a_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_bytes(b'{"text": ""}\n')
    with pytest.raises(UserError, match="no row has text to train on: a row without text, first at rows.jsonl:1"):
        train_tokenizer(config(to="new"))
    assert not Path("new").exists()


def test_tokenizer_training_reads_a_repeated_file_twice(cats, capsys):
    train_tokenizer(config(path=["rows.jsonl", "rows.jsonl"], to="new"))
    assert "tokens from 94 rows" in capsys.readouterr().out


def test_tokenizer_training_reads_json_rows_that_are_named_as_text(cats, capsys):
    cats.rename("rows.jsonl.txt")
    train_tokenizer(config(path=["rows.jsonl.txt"], to="new"))
    captured = capsys.readouterr()
    assert (
        "tokens from 47 rows" in captured.out
        and captured.err == "rows.jsonl.txt: read as JSON Lines, which its content is\n"
    )


def test_tokenizer_training_and_evaluation_print_the_same_table(cats, capsys):
    train_tokenizer(config(to="small", vocab_size=270))
    tables = []
    for settings in ({"to": "new"}, {"tokenizer": "new"}):
        capsys.readouterr()
        train_tokenizer(config(**settings, compare="small"))
        tables.append(capsys.readouterr().out.splitlines()[1:])
    assert tables[0] == tables[1]
    head, vocabulary, rate, unknown, changed = (line.split()[-2:] for line in tables[0])
    assert (
        head == ["new", "small"]
        and vocabulary == ["277", "270"]
        and float(rate[0]) > float(rate[1])
        and unknown == changed == ["0", "0"]
    )


def test_tokenizer_comparison_says_that_dropout_is_switched_off(cats, capsys):
    train_tokenizer(config(to="new"))
    file = Path("new/tokenizer.json")
    file.write_text(
        json.dumps((stored := json.loads(file.read_text())) | {"model": stored["model"] | {"dropout": 0.1}})
    )
    capsys.readouterr()
    train_tokenizer(config(tokenizer="new"))
    assert (
        capsys.readouterr().err
        == "new/tokenizer.json has dropout 0.1, which splits a text in another way each time: it is switched off\n"
    )


def test_tokenizer_training_loads_the_other_tokenizer_first(cats, tmp_path):
    with pytest.raises(UserError, match="a file of the tokenizer is missing"):
        train_tokenizer(config(to="new", compare="none"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_tokenizer_training_keeps_a_model_or_tokenizer(cats, tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="the folder has a model or a tokenizer"):
        train_tokenizer(config(to=str(tmp_path)))
    assert (tmp_path / name).read_text() == "{}" and not (tmp_path / "tokenizer_config.json").exists()


def test_tokenizer_settings_to_and_tokenizer_exclude_each_other():
    with pytest.raises(UserError, match="exclude each other"):
        config(to="new", tokenizer="none")
