"""Encodings of data files: detected, named, converted to UTF-8, or refused with data.encoding."""

import io
import json

import pytest

from common.errors import UserError
from data.sources import byte_stream
from data.sources.byte_stream import check_encoding, guess_encodings, utf8_stream
from data.sources.files import ReadOptions, Source
from data.types import BadRowError

TEXTS = {
    "zh": "我是一只猫，名字还没有。在哪里出生的，完全没有头绪。只记得在一个阴暗潮湿的地方喵喵地哭着。——在这里我第一次看见了人类这种东西。",
    "zh-Hant": "我是一隻貓。名字還沒有。出生在哪裡完全沒有頭緒。只記得在一個陰暗潮濕的地方喵喵地哭。我在這裡第一次看見了人類這種東西。",
    "ja": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所でニャーニャー泣いていた事だけは記憶している。",
    "ko": "나는 고양이로소이다. 이름은 아직 없다. 어디서 태어났는지 도무지 짐작이 가지 않는다. 어둡고 축축한 곳에서 야옹야옹 울고 있던 것만은 기억하고 있다.",
    "ru": "Я кот, и имени у меня пока нет. Где я родился, не имею ни малейшего понятия. Помню только, что мяукал в каком-то тёмном и сыром месте.",
    "fr": "Je suis un chat. Je n’ai pas encore de nom. Je n’ai aucune idée de l’endroit où je suis né ; je me rappelle seulement qu’il était sombre et mouillé, "
    "et que j’y miaulais à fendre l’âme. C’est là que, pour la première fois, j’ai aperçu un être humain. Plus tard, j’appris qu’il était étudiant.",
}
DETECTED = [
    ("zh", "gbk", "gb18030"), ("zh", "gb2312", "gb18030"), ("zh", "gb18030", "gb18030"), ("zh-Hant", "big5", "big5"), ("ja", "shift_jis", "cp932"), ("ko", "euc_kr", "cp949"), ("ru", "cp1251", "cp1251"), ("ru", "koi8_r", "koi8_r"), ("fr", "cp1252", "cp1252"),
    *[(language, encoding, encoding) for language in TEXTS for encoding in ("utf-16", "utf-32")], *[(language, "utf-8-sig", "utf-8") for language in TEXTS],
]  # fmt: skip


def rows(source):
    return [row for _, row in source.rows()]


@pytest.mark.parametrize("language, written, detected", DETECTED)
def test_encoding_of_a_file_is_detected_and_reported(write, language, written, detected):
    # GB 2312 has another dash in Python
    text = "\n".join([TEXTS[language]] * 2).replace("——" if written == "gb2312" else "\0", "-")
    source = Source.open(write(text.encode(written), "book.txt"))
    assert rows(source) == [{"text": text}]
    assert (source.encoding, source.detected) == (detected, "" if detected == "utf-8" else f"encoding {detected}")


@pytest.mark.parametrize("encoding", ["gbk", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize(
    "name, content",
    [("rows.jsonl", '{"text": "%s"}\n'), ("rows.json", '\n[{"text": "%s"}]'), ("rows", '[{"text": "%s"}]')],
)
def test_encoding_of_json_needs_no_byte_order_mark(write, name, content, encoding):
    assert rows(Source.open(write((content % TEXTS["zh"]).encode(encoding), name))) == [{"text": TEXTS["zh"]}]


def test_encoding_of_a_gbk_file_is_never_called_latin1(write):
    """Before: `not UTF-8`, and the fix `iconv -f LATIN1`, which makes another text of it."""
    path = write((json.dumps({"text": TEXTS["zh"]}, ensure_ascii=False) + "\n").encode("gbk") * 3)
    assert [row["text"] for row in rows(Source.open(path))] == [TEXTS["zh"]] * 3
    few = "我" + "a" * 100  # two bytes that are not ASCII prove nothing
    with pytest.raises(BadRowError) as error:
        rows(Source.open(write(json.dumps({"text": few}, ensure_ascii=False).encode("gbk"))))
    assert (
        error.value.reason == "not UTF-8"
        and "data.encoding=" in error.value.fix
        and "latin" not in error.value.fix.lower()
    )
    assert rows(Source.open(path.parent / "rows.jsonl", ReadOptions(encoding="gbk"))) == [{"text": few}]


def test_encoding_of_a_few_accents_is_refused_with_a_guess_that_reads_them(write):
    path = write('{"text": "un café"}\n{"text": "the second row"}\n'.encode("cp1252"))
    bad = []
    assert [row for _, row in Source.open(path).rows(bad.append)] == [{"text": "the second row"}]
    (error,) = bad
    assert error.setting == f"{path}:1, byte 17" and "a guess is data.encoding=" in error.fix
    guess = error.fix.partition("data.encoding=")[2].split()[0]
    assert rows(Source.open(path, ReadOptions(encoding=guess)))[0] == {"text": "un café"}


def test_encoding_stays_utf8_where_a_row_is_damaged(write):
    content = (
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS.values()).encode()
        + b'{"text": "\xff\xfe"}\n'
    )
    bad = []
    assert len(list(Source.open(write(content)).rows(bad.append))) == len(TEXTS) and [
        error.reason for error in bad
    ] == ["not UTF-8"]


def test_encoding_that_is_given_does_not_apply_to_files_in_utf8(write):
    """`data.encoding=gbk` for a folder of which some files are UTF-8."""
    options = ReadOptions(encoding="gbk")
    for written in ("utf-8", "utf-8-sig", "gbk", "utf-16"):
        assert rows(Source.open(write(TEXTS["zh"].encode(written), "book.txt"), options)) == [{"text": TEXTS["zh"]}]


def test_encoding_that_does_not_fit_makes_rows_bad_and_not_wrong(write):
    with pytest.raises(BadRowError, match="not valid in the encoding ascii"):
        rows(Source.open(write(TEXTS["fr"].encode("cp1252"), "book.txt"), ReadOptions(encoding="ascii")))


def test_encoding_without_its_byte_order_mark_is_refused(write):
    with pytest.raises(UserError, match="not text in utf-16") as error:
        Source.open(write("été".encode("utf-16-le"), "book.txt"), ReadOptions("utf-16"))
    assert "data.encoding=utf-16-le" in error.value.fix


@pytest.mark.parametrize("name", ["hex", "nope", "rot13", ""])
def test_encoding_that_python_does_not_know_is_refused(name):
    with pytest.raises(UserError) as error:
        check_encoding(name)
    assert error.value.setting == f"data.encoding={name}" and "gb18030" in error.value.fix


@pytest.mark.parametrize("encoding", ["gb18030", "utf-16", "cp932"])
def test_conversion_to_utf8_is_that_of_the_whole_text_for_any_chunk_size(monkeypatch, encoding):
    text = (TEXTS["ja"] + "\r\n") * 20
    for size in (1, 3, 64):
        monkeypatch.setattr(byte_stream, "READ_BYTES", size)
        assert utf8_stream(io.BytesIO(text.encode(encoding)), encoding).read() == text.encode()


def test_guess_does_not_depend_on_where_the_sample_is_cut(monkeypatch):
    for size in range(200, 208):
        monkeypatch.setattr(byte_stream, "DETECT_BYTES", size)
        for text in (TEXTS["zh"] * 3, f"{TEXTS['zh']}\n" * 3):
            assert guess_encodings(text.encode("gbk")) == (["gb18030"], True)


@pytest.mark.parametrize("text", ["Москва является столицей России\n", "Быстрая коричневая лиса\n"])
def test_encoding_of_a_short_text_is_not_that_of_another_language(write, text):
    """Before: read as Japanese, valid in cp932 but without kana."""
    source = Source.open(write(text.encode("koi8_r"), "book.txt"))
    assert source.encoding == "utf-8" and not list(source.rows(on_bad=lambda error: None))


FRENCH = "Les élèves français étaient déjà arrivés à l'école où le professeur préparait la leçon. Ils espéraient réussir l'épreuve malgré les difficultés de l'année scolaire. La vérité était très différente."
PORTUGUESE = "A informação não está disponível. Você também pode verificar as opções de configuração e a solução será apresentada até amanhã. O coração da nação é a educação."
ESTONIAN = "Täna on ilus päev ja linnud laulavad õues. Me läheme järve äärde hommikusööki sööma. Paljudele inimestele meeldib sügis, aga mina armastan suve ja öid."


@pytest.mark.parametrize(
    "text, encoding", [(FRENCH, "cp1252"), (PORTUGUESE, "cp1252"), (ESTONIAN, "cp1257")], ids=["fr", "pt", "et"]
)
def test_encoding_is_not_certain_where_another_one_gives_a_text_as_good(text, encoding):
    """Before: French read as cp1257 ("élčves"), Estonian as mac_latin2."""
    content = f"{text}\n".encode(encoding) * 3
    candidates, is_certain = guess_encodings(content)
    assert not is_certain
    assert encoding != "cp1252" or candidates[0] == encoding
