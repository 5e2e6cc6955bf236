import json
import subprocess
import sys
from pathlib import Path

from data.sources.files import Source
from data.tokenize.tokenizer import Tokenizer
from data.tokenize.tokenizer_corpus import HOLDOUT_EVERY, CorpusStats, iter_corpus, measure_tokenizer

COMMAND = Path(__file__).parents[2] / "runner" / "tokenizer.py"


def run(*words, folder):
    return subprocess.run([sys.executable, str(COMMAND), *words], cwd=folder, capture_output=True, text=True, timeout=60)


def test_every_string_of_any_shape_is_read_but_not_who_says_it(write):
    rows = [{"text": "held out"}, {"conversations": [{"role": "user", "content": "hi"}]}, {"instruction": "do", "input": "", "output": ["it"], "score": 5}]
    survey = CorpusStats()
    assert list(iter_corpus([Source.open(write(rows))], 100, survey)) == ["hi", "do", "it"]
    assert [text for _, text in survey.held_out["rows.jsonl", "en"]] == ["held out"] and survey.rows == 2


def test_what_stands_beside_the_words_is_not_read(write):
    rows = [{"text": "first"}, {"text": "words", "url": "http://a.b/c", "timestamp": "2020"}, {"note": "of no known shape"}]
    assert list(iter_corpus([Source.open(write(rows))], 100, CorpusStats())) == ["words", "of no known shape"]


def test_bad_and_empty_rows_are_counted_and_the_first_is_named(write):
    survey = CorpusStats()
    path = write(b'{"text": "a"}\n{\n{"text": " "}\n{\n{"text": "b"}\n')
    assert list(iter_corpus([Source.open(path)], 100, survey)) == ["b"]
    assert survey.bad == {"broken JSON": 2, "a row without text": 1}
    assert survey.first["a row without text"] == f"{path}:3" and survey.first["broken JSON"].startswith(f"{path}:2")


def test_the_cap_counts_rows_of_each_file_and_a_file_named_twice_counts_double(write):
    path = write([{"text": str(number)} for number in range(100)])
    survey = CorpusStats()
    assert list(iter_corpus([Source.open(path)] * 2, 10, survey)) == [str(number) for number in range(1, 10)] * 2
    assert survey.held_out == {("rows.jsonl", "en"): [(f"{path}:1", "0")]} and HOLDOUT_EVERY > 10


def test_the_languages_are_measured_apart(write):
    survey = CorpusStats()
    path = write([{"conversations": [{"content": "今天天气 good"}, {"content": "A cup of 茶 please"}]}])
    list(iter_corpus([Source.open(path)], 10, survey))
    assert set(survey.held_out) == {("rows.jsonl", "zh"), ("rows.jsonl", "en")}


def test_the_command_trains_a_tokenizer_and_leaves_nothing_else(write, tmp_path):
    write(b"\n".join(json.dumps({"text": f"the cat and the dog {number}"}).encode() for number in range(50)) + b"\n{")
    done = run("path=rows.jsonl", "to=new", "vocab_size=280", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "words from 47 rows" in done.stdout and "characters a token" in done.stdout and "left out 1: file cut off" in done.stdout
    assert Tokenizer.load(tmp_path / "new").vocab_size <= 280
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "rows.jsonl"]


def test_the_command_refuses_without_a_traceback(tmp_path):
    for words in (["path=none.jsonl", "to=new"], ["to=new"], ["path=none.jsonl", "to=new", "vocab_size=12"]):
        done = run(*words, folder=tmp_path)
        assert done.returncode == 2 and [line.split(":")[0].strip() for line in done.stderr.splitlines()] == ["error", "where", "fix"]
    assert not list(tmp_path.iterdir())


def test_a_file_alone_may_have_any_name_and_the_last_of_several_is_looked_for_first(write, tmp_path):
    write([{"text": f"the cat and the dog {number}"} for number in range(50)]).rename(tmp_path / "it's a, b.jsonl")
    assert "words from 47 rows" in run("path=it's a, b.jsonl", "to=new", "vocab_size=280", folder=tmp_path).stdout
    both = 'path=["it\'s a, b.jsonl","it\'s a, b.jsonl"]'
    assert "words from 94 rows" in run(both, "to=newer", "vocab_size=280", folder=tmp_path).stdout
    done = run('path=["it\'s a, b.jsonl",none.jsonl]', "to=never", "vocab_size=12", folder=tmp_path)
    assert done.returncode == 2 and "none.jsonl" in done.stderr and not (tmp_path / "never").exists()


def test_a_byte_without_a_token_is_counted_and_the_text_named(tokenizer):
    class Deaf:  # to one letter
        vocab_size = 1

        def encode_batch(self, texts):
            return tokenizer.encode_batch([text.replace("é", "") for text in texts])

        def decode(self, ids, skip_special):
            return tokenizer.decode(ids, skip_special)

    held_out = {("a", "en"): [("a:1", "plain"), ("a:2", "café, fiancé")]}
    deaf, shipped = measure_tokenizer(Deaf(), held_out), measure_tokenizer(tokenizer, held_out)
    assert deaf.unknown == 4 and deaf.changed == ["a:2"]
    assert shipped.unknown == 0 and shipped.changed == []


def test_two_tokenizers_stand_side_by_side(write, tmp_path):
    write([{"text": f"the cat and the dog {number}"} for number in range(50)])
    run("path=rows.jsonl", "to=small", "vocab_size=270", folder=tmp_path)
    trained = run("path=rows.jsonl", "to=new", "vocab_size=280", "compare=small", folder=tmp_path)
    measured = run("path=rows.jsonl", "tokenizer=new", "compare=small", folder=tmp_path)
    assert trained.returncode == measured.returncode == 0, trained.stderr + measured.stderr
    assert trained.stdout.splitlines()[1:] == measured.stdout.splitlines()[1:]
    head, vocabulary, rate, unknown, changed = (line.split()[-2:] for line in measured.stdout.splitlines()[1:])
    assert head == ["new", "small"] and vocabulary == ["277", "270"] and float(rate[0]) > float(rate[1]) and unknown == changed == ["0", "0"]


def test_a_tokenizer_to_compare_with_is_looked_for_before_training(write, tmp_path):
    write([{"text": "a"}])
    done = run("path=rows.jsonl", "to=new", "compare=none", folder=tmp_path)
    assert done.returncode == 2 and "none" in done.stderr and not (tmp_path / "new").exists()
    done = run("path=rows.jsonl", "to=new", "tokenizer=none", folder=tmp_path)
    assert done.returncode == 2 and "leave one of them out" in done.stderr
