"""Labelled texts of one's own: parsed under limits, kept, and named in the code; and
the columns of a table before it is uploaded.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import hiddenscope as hs
from hiddenscope.app import uploads
from hiddenscope.app.code import Named, as_command
from hiddenscope.app.schemas import ColumnChoice
from hiddenscope.app.uploads import Uploads, preview_table
from hiddenscope.errors import TextError
from tests.workbench.code import check_code, same
from tests.workbench.serving import Bench

ROWS = [
    ("the rest is", "good"),
    ("the test was", "bad"),
    ("the real one", "good"),
    ("they take it", "bad"),
]
REVIEWS = "review,sentiment,author\n"
for number in range(3):
    for text, label in ROWS:
        REVIEWS += f"{text} {number},{label},writer {number}\n"
COLUMNS = ColumnChoice(text="review", label="sentiment", group="author")


def test_errors_name_the_file_as_its_owner_does(tmp_path: Path) -> None:
    uploads, columns = Uploads(tmp_path), ColumnChoice(text="text")
    for name, said in {
        "reviews.csv": "of reviews.csv",
        "a/b/etc.csv": "of etc.csv",
        "C:\\folder\\mine.csv": "of mine.csv",
        "\x1b[31m.csv": r"of \x1b[31m.csv",
        f"{'a' * 300}.csv": "aaa.csv",
    }.items():
        with pytest.raises(TextError) as caught:
            uploads.add(name, b"text,label\na,b\nc,d,e\n", columns)
        assert said in str(caught.value) and "Line 3" in str(caught.value)


def test_an_upload_is_kept_on_disk_and_read_again(tmp_path: Path) -> None:
    name, upload = Uploads(tmp_path).add("a/reviews.csv", REVIEWS.encode(), COLUMNS)
    assert uploads.UPLOAD_NAME.fullmatch(name)
    assert upload.data.name == "reviews.csv" and upload.columns == COLUMNS
    assert upload.data.labels == ("good", "bad", "good", "bad") * 3
    assert upload.data.groups is not None and len(set(upload.data.groups)) == 3
    again = Uploads(tmp_path)
    assert again.names() == [name] and again.get(name) == upload
    assert again.add("reviews.csv", REVIEWS.encode(), COLUMNS)[0] == name
    other = ColumnChoice(text="review", label="author")
    assert again.add("reviews.csv", REVIEWS.encode(), other)[0] != name
    for content in ("", "[]", '{"file": 1}'):
        (tmp_path / "0123456789abcdef.json").write_text(content)
        assert again.get("upload:0123456789abcdef") is None
    plain = again.add("a.txt", b"One.\nTwo.\n", ColumnChoice())[1].data
    assert (plain.texts, plain.labels, plain.groups) == (("One.", "Two."), None, None)


def test_the_last_uploads_are_kept_in_memory_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_UPLOADS", 2)
    kept = Uploads(tmp_path / "uploads")
    names = [
        kept.add("a.txt", f"Number {k}.\n".encode(), ColumnChoice())[0]
        for k in range(3)
    ]
    assert kept.get(names[0]) is None and kept.get(names[2]) is not None
    assert len(list((tmp_path / "uploads").iterdir())) == 2
    # Where nothing can be written, memory has to do.
    (tmp_path / "file").write_text("a file where the folder should be")
    unwritten = Uploads(tmp_path / "file")
    name, upload = unwritten.add("a.txt", b"One.\n", ColumnChoice())
    assert unwritten.get(name) == upload and unwritten.names() == [name]


def test_what_cannot_be_taken_is_refused_in_a_sentence(bench: Bench) -> None:
    wide = ",".join(f"c{number}" for number in range(20_000))
    for name, content, said in (
        ("a.exe", b"x", "not a known format"),
        ("a.parquet", b"PAR1", "not a known format"),
        ("a.csv", b"", "empty"),
        ("a.txt", b"x" * 20_001, "has 20,001 characters"),
        ("a.txt", b"x\n" * 20_001, "is row 20,001"),
        ("a.csv", b"text\n\xff\xfe\n", "not UTF-8"),
        ("a.csv", f"{wide},twice,twice\n".encode(), "'twice'"),
        ("a.jsonl", b'{"text": "a", "label": "\\ud800"}\n', "half of a character"),
        ("a.jsonl", b'{"text": "a", "label": [1, 2]}\n', "line 1 has a label with"),
        ("a.jsonl", b'{"text": "a", "label": {"a": 1}}\n', "line 1 has a label with"),
    ):
        answer = bench.ask("POST", f"/api/datasets?file={name}", content)
        assert answer.status == 422, (name, answer.body)
        assert said in answer.json["detail"]
    assert bench.ask("POST", "/api/datasets", b"x").status == 422
    largest = b"x" * 20_000 + b"\n" + b"y\n" * 19_999
    uploaded = bench.ask("POST", "/api/datasets?file=a.txt", largest)
    assert (uploaded.status, uploaded.json["texts"]) == (201, 20_000)


def test_the_columns_and_groups_of_an_upload_reach_the_analysis_and_its_code(
    bench: Bench, tiny_name: str, tmp_path: Path
) -> None:
    """Also those of a file whose name begins like an option."""
    (tmp_path / "-reviews.csv").write_text(REVIEWS)
    named = "text=review&label=sentiment&group=author"
    path = f"/api/datasets?file=-reviews.csv&{named}"
    upload = bench.ask("POST", path, REVIEWS.encode()).json
    assert upload["groups"] == 3 and upload["labels"] == {"good": 6, "bad": 6}
    assert upload["columns"] == COLUMNS.model_dump()
    listed = bench.ask("GET", "/api/datasets").json
    assert upload["name"] in [one["name"] for one in listed]
    answer = bench.answer("probe", tiny_name, data=upload["name"], sites="layer.1")
    result = bench.result(answer, tmp_path)
    data = hs.read(tmp_path / "-reviews.csv", **COLUMNS.model_dump())
    model = hs.load(bench.settings.root / "models" / "tiny")  # type: ignore[operator]
    assert same(result, hs.probe(model, data, sites="layer.1"))
    check_code(answer, result, tmp_path)
    assert "--group author" in answer["command"]
    asked = {"analysis": "graft", "model": {"name": "a"}, "arguments": {"data": "x"}}
    grafted = as_command(asked, {"x": Named("a.csv", {"text": "sentence"})})
    assert grafted.text is not None and "--text sentence" in grafted.text


def test_the_columns_and_first_rows_of_a_table_are_read(bench: Bench) -> None:
    answer = bench.ask("POST", "/api/tables?file=reviews.csv", REVIEWS.encode())
    read = answer.json
    assert read["columns"] == ["review", "sentiment", "author"] and not read["certain"]
    assert read["rows"][0] == ["the rest is 0", "good", "writer 0"]
    assert len(read["rows"]) == 5
    assert read["likely"] == {"text": "review", "label": None, "group": None}
    roles = [(one["name"], one["kind"], one["required"]) for one in read["parameters"]]
    assert roles == [
        ("text", "choice", True),
        ("label", "choice", False),
        ("group", "choice", False),
    ]
    for one in read["parameters"]:
        assert one["choices"] == read["columns"] and one["help"]


def test_no_table_is_a_500(bench: Bench) -> None:
    deep = '{"text": ' + "[" * 2_000 + "]" * 2_000 + "}"
    for content, columns in (
        (deep, []),
        ("[" * 5_000, []),
        ('{"text": "half \\ud83d"}', ["text"]),
        ('{"half \\ud83d": "a", "label": ["\\ud83d"]}', ["half ?", "label"]),
        ('{"text": 1' + "0" * 5_000 + "}", []),
    ):
        for route in ("tables", "uploads"):
            answer = bench.ask(
                "POST", f"/api/{route}?file=a.jsonl&text=text", content.encode()
            )
            assert answer.status < 500, (route, content[:40])
            if route == "tables":
                assert answer.json["columns"] == columns


def test_a_table_of_any_kind_is_looked_at() -> None:
    """What cannot be read has no columns here; whoever uploads it is told why."""
    record: dict[str, Any] = {"text": "The rest.", "label": 1, "parts": [1], "no": None}
    for file, content, columns in (
        ("a.csv", "\ufefftext,label\n\nThe rest.,a\n", ["text", "label"]),
        ("a.tsv", "text\tlabel\nThe rest.\ta\n", ["text", "label"]),
        ("a.jsonl", json.dumps(record), ["text", "label", "parts", "no"]),
        ("a.txt", "The rest.\n", []),
        ("a.jsonl", "[1, 2]\n{", []),
        ("a.csv", "\0\ufffd", []),
        ("a.csv", "", []),
    ):
        table = preview_table(f"folder/{file}", content.encode())
        assert table.columns == columns and table.file == file
        assert table.certain == ("text" in columns)
        if table.certain:
            assert (table.likely.text, table.likely.label) == ("text", "label")
    rows = preview_table("a.jsonl", json.dumps(record).encode()).rows
    assert rows == [["The rest.", "1", "[1]", ""]]
    with pytest.raises(TextError, match="not a known format"):
        preview_table("rows.exe", b"MZ")


def test_only_the_beginning_of_a_table_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads, "MAX_COLUMNS", 2)
    monkeypatch.setattr(uploads, "MAX_CELL_CHARACTERS", 4)
    table = preview_table("a.csv", b"label,words,more\na,a long text,b\n")
    assert table.columns == ["label", "words"] and table.rows == [["a", "a lo"]]
    # The label has its name, so what is left are the texts.
    assert (table.likely.text, table.likely.label) == ("words", "label")
