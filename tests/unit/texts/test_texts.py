"""Texts: the same rows from every kind of source, a number for every bad one, and a
million in little memory.
"""

import csv
import gzip
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import hiddenscope as hs
from hiddenscope import files as bounded
from hiddenscope.cli.arguments import dataset
from hiddenscope.errors import FileError, TextError, TooLarge
from hiddenscope.texts import (
    Labelled,
    Row,
    belonging,
    copy_key,
    number_groups,
    read,
    rows,
    shipped,
)
from hiddenscope.texts import files as files_of_texts

TEXTS, LABELS = ("one, two", 'a "quoted" text', "ünï cödé"), ("x", "y", "x")
GROUPS = ("a", "b", "a")
FRAME = pandas.DataFrame({"n": [1, 2, 3], "text": TEXTS, "label": LABELS})
GROUPED = FRAME.assign(group=GROUPS)


def as_csv(separator: str = ",") -> str:
    return GROUPED.to_csv(index=False, sep=separator)


def as_jsonl() -> str:
    return GROUPED.to_json(orient="records", lines=True)


def files(folder: Path) -> Iterator[Path]:
    plain = {".csv": as_csv(), ".tsv": as_csv("\t"), ".jsonl": as_jsonl()}
    for suffix, said in plain.items():
        data = said.encode()
        for packing, packed in {
            "": data,
            ".gz": gzip.compress(data),
            ".zst": zstandard.compress(data),
        }.items():
            path = folder / f"some{suffix}{packing}"
            path.write_bytes(packed)
            yield path
    GROUPED.to_parquet(folder / "some.parquet")
    yield folder / "some.parquet"


class Named(io.BytesIO):
    """Bytes in a file that has a name."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def assert_same_rows(source: Any) -> None:
    """Read the rows, and their groups where they are asked for."""
    found = read(source)
    assert (found.texts, found.labels) == (TEXTS, LABELS), source
    assert found.groups is None, "a column that is not named says nothing"
    assert [row.text for row in rows(source)] == list(TEXTS)
    assert read(source, group="group").groups == GROUPS
    assert [row.group for row in rows(source, group="group")] == list(GROUPS)
    assert read(read(source, group="group")).groups == GROUPS
    assert read(source, label="group", group="group").labels == GROUPS
    for given_groups in ([1, 2, 1], np.array([1, 2, 1])):
        assert read(source, group=given_groups).groups == (1, 2, 1)


def test_every_source_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [json.loads(line) for line in as_jsonl().splitlines()]
    for source in [*files(tmp_path), GROUPED, records]:
        assert_same_rows(source)
    pairs = list(zip(TEXTS, LABELS, strict=True))
    some: list[Any] = [(TEXTS, LABELS), (list(TEXTS), np.array(LABELS)), pairs]
    for source in [*some, [list(pair) for pair in pairs], iter(pairs)]:
        found = read(source, group=[0, 1, 0])
        assert (found.texts, found.labels, found.groups) == (TEXTS, LABELS, (0, 1, 0))
    assert read((TEXTS, np.array([1, 2, 3]))).labels == (1, 2, 3)
    for path in files(tmp_path):
        with path.open("rb") as stream:
            assert read(stream).texts == TEXTS
            assert not stream.closed
        assert read(str(path)).name == "some"
    for name, said in (("-.csv", as_csv()), ("-.jsonl", as_jsonl())):
        stdin(monkeypatch, said.encode())
        assert read(name) == Labelled(TEXTS, LABELS, "stdin")


@pytest.mark.slow
def test_datasets_of_the_hub_give_the_same_rows() -> None:
    import datasets

    data = datasets.Dataset.from_dict(GROUPED.to_dict("list"))
    assert_same_rows(data)
    assert read(data.to_iterable_dataset()).texts == TEXTS
    with pytest.raises(TextError, match=r"the splits 'train'.*data\['train'\]"):
        read(datasets.DatasetDict({"train": data}))
    numbers = data.remove_columns("label").add_column("label", [0, 1, 0])
    assert read(numbers).labels == (0, 1, 0)
    named = numbers.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    assert read(named).labels == ("no", "yes", "no")


def test_compressed_streams_are_read_once_and_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl.gz"
    path.write_bytes(gzip.compress(as_jsonl().encode()))
    # One that is open already is not unpacked twice.
    with gzip.open(path, "rb") as stream:
        assert read(stream).texts == TEXTS
    with gzip.open(path, "rt", encoding="utf-8") as text:
        assert read(text, text="text").texts == TEXTS
    mine = io.BytesIO(path.read_bytes())
    assert read(mine, text="text").texts == TEXTS
    assert not mine.closed
    frames = zstandard.compress(b"one\n") + zstandard.compress(b"two\n")
    assert read(Named(frames, "two.txt.zst")).texts == ("one", "two")
    with pytest.raises(FileError, match="not a complete parquet file"):
        read(Named(gzip.compress(b"x"), "a.parquet.gz"))


def test_lines_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes("\ufefffirst\r\n\r\n  second \nthird".encode())
    numbered = [("first", 1), ("  second ", 3), ("third", 4)]
    assert list(rows(path)) == [Row(text, None, line) for text, line in numbered]
    assert read(path) == Labelled(("first", "  second ", "third"), None, "lines")
    stdin(monkeypatch, b"one\ntwo\n")
    assert read("-").texts == ("one", "two")
    stdin(monkeypatch, as_jsonl().encode())
    assert read("-", label="label").labels == LABELS
    for some in (["one", "two"], pandas.Series(["one", "two"]), ("one", "two")):
        assert read(some) == read(iter(["one", "two"]))
        assert (read(some).texts, read(some).labels) == (("one", "two"), None)
    # A quoted text of several lines has the line that it begins on.
    quoted = Named(b'text,label\n"one\ntwo",x\n\nthree,y\n', "long.csv")
    found = [(row.text, row.line) for row in rows(quoted)]
    assert found == [("one\ntwo", 2), ("three", 5)]
    # A file may be closed before all its rows are read.
    with io.BytesIO(as_jsonl().encode()) as file:
        begun = rows(file, text="text")
        assert next(begun).text == TEXTS[0]
    begun.close()


# A blank one is refused.
CHARACTERS = st.characters(exclude_categories=["Cs"])
SOME_TEXT = st.text(CHARACTERS, min_size=1).filter(str.strip)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(SOME_TEXT, st.sampled_from("ab")), min_size=1))
def test_what_was_written_comes_back(pairs: list[tuple[str, str]]) -> None:
    texts, labels = zip(*pairs, strict=True)
    lines = [json.dumps({"text": text, "label": label}) for text, label in pairs]
    found = read(io.BytesIO("\n".join(lines).encode()), text="text")
    assert found == Labelled(texts, labels, "the texts")
    written = io.StringIO(newline="")
    csv.writer(written).writerows([("text", "label"), *pairs])
    found = read(Named(written.getvalue().encode(), "some.csv"))
    assert found == Labelled(texts, labels, "some")


def test_columns_with_obvious_names_are_found() -> None:
    for names, text, label in (
        ("id,Sentence,Class", "Sentence", "Class"),
        ("text,prompt,label", "text", "label"),
        ("review,target", "review", "target"),
        ("review", "review", None),
        # The unnamed first column of a table is neither a label nor a group.
        (",text", "text", None),
    ):
        cells = ",".join(f"the {name}" for name in names.split(","))
        found = read(Named(f"{names}\n{cells}\n".encode(), "some.csv"))
        labels = label and (f"the {label}",)
        assert (found.texts, found.labels) == ((f"the {text}",), labels)
        assert found.groups is None


def test_columns_that_are_not_obvious_are_asked_for() -> None:
    similar = "it has 'text', 'label'. Did you mean 'text'?"
    for header, options, what in (
        ("a,b", {}, "they are 'a', 'b', and none is plainly the text. Name the one"),
        ("prompt,content", {}, "'prompt', 'content' could each be the text"),
        ("text,class,target", {}, "'class', 'target' could each be the label"),
        ("text,label", {"text": "texts"}, f"No column 'texts' in some.csv: {similar}"),
        ("text,label", {"label": "zzz"}, "Name one of these."),
        ("text,text", {}, "two are called 'text'"),
        ("text,b", {"label": "text"}, "'text' would be both"),
        ("The cat sat.", {}, "none is plainly the text"),
    ):
        row = ",".join("x" for _ in header.split(","))
        with pytest.raises(TextError, match="some.csv") as error:
            read(Named(f"{header}\n{row}\n".encode(), "some.csv"), **options)
        assert what in str(error.value)


GZIP = gzip.compress(b"x\n" * 999, mtime=0)
ZSTD = zstandard.compress(b"x\n" * 999)
WRONG: list[tuple[str, bytes, str]] = [
    ("a.jsonl", b'{"text": "x"}\n\n{"text": \n', "Line 3 of a.jsonl: it is not JSON"),
    ("a.jsonl", b"[" * 100_000, "Line 1 of a.jsonl: it is not JSON"),
    ("a.txt", b"x\n\xff\xfe\n", "Line 2 of a.txt: it is not UTF-8 (byte 1 of the line"),
    ("a.csv", b"text,label\nx,1\n\xe4,2\n", "Line 3 of a.csv: it is not UTF-8"),
    ("a.csv", b"text,label\nx,1\nx,2,3\n", "Line 3 of a.csv: it has 3 columns and the"),
    ("a.csv", b'text,label\nx,1\n"x,2\n', "Line 3 of a.csv: it is not a row of values"),
    ("a.csv", b"text,label\nx,1\n,2\n", "Line 3 of a.csv: the text is empty"),
    ("a.csv", b"text,label\nx,1\n  ,2\n", "Line 3 of a.csv: the text is empty"),
    ("a.csv", b"text,label\nx,1\ny,\n", "labels of a: row 3 has no label."),
    ("a.csv", b"", "No texts in 'a.csv': it holds none. Give at least one."),
    ("b.csv", b"text,label\n", "No texts in 'b.csv': it holds none."),
    ("a.txt.gz", GZIP[:-9], "Cannot read a.txt.gz: it cannot be decompressed to the"),
    ("a.txt.gz", GZIP[:-8] + b"12345678", "a.txt.gz: it cannot be decompressed"),
    ("a.txt.zst", ZSTD[:9] + b"no", "Cannot read a.txt.zst: it cannot be decompressed"),
    ("cut.txt.zst", ZSTD[:-3], "Cannot read cut.txt.zst: it cannot be decompressed"),
    ("a.parquet", b"nothing", "Cannot read a.parquet: it is not a complete parquet"),
    ("a.xml", b"x", "Cannot read texts from "),
]
# As the second row of a.jsonl.
WRONG_ROWS = {
    '{"texts": "y"}': "it has no 'text', only 'texts'",
    '{"text": 5}': "the text is of type int",
    '{"text": null}': "the text is missing",
    "[1]": "it is of type list and not a row",
    '{"text": "\\ud800"}': "the text holds half of a character",
    '{"text": ""}': "the text is empty",
}


def test_what_is_wrong_has_a_number(tmp_path: Path) -> None:
    cases = list(WRONG)
    for row, reason in WRONG_ROWS.items():
        data = f'{{"text": "x"}}\n{row}\n'.encode()
        cases.append(("a.jsonl", data, f"Line 2 of a.jsonl: {reason}"))
    for name, data, what in cases:
        (tmp_path / name).write_bytes(data)
        with pytest.raises((TextError, FileError)) as error:
            read(tmp_path / name)
        assert what in str(error.value)


NOTHING: list[tuple[Any, dict[str, Any], str]] = [
    ("no/such.csv", {}, "there is no such file"),
    ("cities-incomplet", {}, "Did you mean 'cities-incomplete'?"),
    ("The cat sat on the mat.", {}, "for a single text a list: [text]"),
    # A name that no file system takes.
    ("a long text " * 500, {}, "Give a path"),
    ("-.xml", {}, "it names no known format"),
    (5, {}, "the source is of type int"),
    (b"bytes", {}, "the source is of type bytes"),
    ({"text": ["x"]}, {}, "it is a mapping with 'text'"),
    ([], {}, "No texts: the list is empty"),
    ([""], {}, "Row 1 of the list: the text is empty"),
    (["x", 5], {}, "Row 2 of the list: the text is of type int"),
    ([[1, 2]], {}, "Row 1 of the list: it is of type list"),
    (range(10**12), {}, "Row 1 of the list: it is of type int"),
    ((range(10**12), range(10**12)), {}, "a range has more than 4,194,304 items"),
    ((["a", "b"], ["x"]), {}, "there are 2 texts and 1 labels"),
    ((["a"], 5), {}, "Give two lists"),
    ((["a", "b"], ["x", None]), {}, "row 2 has no label"),
    ((["a", "b"], ["x", float("nan")]), {}, "row 2 has no label"),
    (
        [("a", 1), "b"],
        {},
        "Row 2 of the list: it is of type str and not a (text, label)",
    ),
    (
        [("a", 1)],
        {"label": "label"},
        "No column 'label' in the list: it has no columns",
    ),
    (["a"], {"text": "text"}, "it has no columns"),
    (["a"], {"group": "topic"}, "it has no columns. Give group= a list"),
    ((["a"], ["x"]), {"group": "topic"}, "No column 'topic' in (texts, labels)"),
    (FRAME, {"group": "topic"}, "in the frame: it has 'n', 'text', 'label'"),
    (FRAME, {"group": [1, 2]}, "groups of the texts: there are 3 texts and 2 groups."),
    (FRAME, {"group": [1, 2, None]}, "groups of the texts: row 3 has no group."),
    (FRAME, {"group": [1, None, None]}, "row 2 has no group, like 1 more of 3. Give"),
    (FRAME, {"group": [[1], [2], [3]]}, "a group is of type list"),
    (FRAME, {"group": 5}, "group is of type int"),
    (FRAME, {"group": iter([1, 2, 3])}, "group is of type list_iterator"),
]


def test_what_is_no_source_is_said() -> None:
    for source, options, what in NOTHING:
        with pytest.raises((TextError, FileError)) as error:
            read(source, **options)
        assert what in str(error.value)
        assert isinstance(error.value, hs.errors.Error)


def test_a_long_text_is_read_whole() -> None:
    long, limit = "word " * 100_000, csv.field_size_limit()
    for name, said in (
        ("a.csv", f"text\n{long}\n"),
        ("a.tsv", f"text\n{long}\n"),
        ("a.jsonl", json.dumps({"text": long})),
        ("a.txt", long),
    ):
        assert read(Named(said.encode(), name)).texts == (long,), name
    # What is the whole process's stays as it was.
    assert csv.field_size_limit() == limit


def test_what_was_read_is_a_source_and_texts(tiny: Any) -> None:
    data = hs.read(FRAME, text="text", label="label")
    assert hs.read(data) == data and [row.label for row in rows(data)] == list(LABELS)
    assert hs.read(hs.read(["a", "b"])).labels is None
    assert list(data) == list(TEXTS) and len(data) == 3
    states = tiny("gpt2").capture(hs.read(["the cat", "a dog"]), "layer.1")
    assert states.tokens.count == 2


def test_very_many_rows_in_little_memory() -> None:
    block = gzip.compress(b"a sentence of some length\n" * 1000)
    before, most, count = sys.getallocatedblocks(), 0, 0
    for row in rows(Named(block * 60, "many.txt.gz")):
        count += len(row.text) == 25
        if count % 20_000 == 1:
            most = max(most, sys.getallocatedblocks() - before)
    assert count == 60_000
    assert most < 10_000, "a row is two blocks, so as many rows kept would be 80,000"


def test_the_cities_are_balanced() -> None:
    assert {"cities-complete", "cities-incomplete"} <= set(shipped())
    cities = ("Toronto", "Montreal")
    for name in ("cities-incomplete", "cities-complete"):
        data = read(name)
        assert data.name == name
        assert Counter(data.labels) == dict.fromkeys(cities, 25)
        assert len(set(data.texts)) == 50
    pairs = list(zip(data.texts, data.labels or (), strict=True))
    assert all(text.endswith(".") and city in text for text, city in pairs)
    data = read("cities-incomplete")
    ends: dict[Any, Counter[str]] = {city: Counter() for city in cities}
    for text, city in zip(data.texts, data.labels or (), strict=True):
        ends[city][text.split()[-1]] += 1
        assert not any(name in text for name in cities)
    assert ends["Toronto"] == ends["Montreal"]


def test_copies_with_other_labels_are_a_group_and_groups_grow_together() -> None:
    texts = ["It rains.", "It rains?", "it rains", "We sold the car."]
    texts += ["They bought a house.", "It  rains!"]
    found = belonging(texts, ["said", "asked", "said", "said", "asked", "said"], None)
    # The first in the alphabet, wherever it stands.
    assert found.first == [False, True, False, True, True, True]
    assert found.copies == 2 and found.groups[0] == found.groups[1] == found.groups[5]
    assert len(set(found.texts)) == 4 and len(set(found.groups)) == 3
    assert not found.grouped
    together = belonging(texts, [0] * 6, ["a", "b", "b", "c", "a", "d"])
    # Copies join the groups a, b and d.
    assert len(set(together.groups)) == 2 and together.grouped
    assert together.facts["groups"] == 2 and together.facts["groups_given"]
    with pytest.raises(TextError, match="there are 6 texts and 2 groups"):
        belonging(texts, [0] * 6, [1, 2])


def test_texts_that_nearly_repeat_one_another_are_found() -> None:
    """A template that all texts share is no repetition, and paraphrases of one group
    are expected.
    """
    pairs = [("doctor", "hospital"), ("train", "station"), ("boy", "garden")]
    pairs += [("storm", "village"), ("king", "castle")]
    ways = ["The {} was near the {}.", "Near the {1} was the {0}."]
    ways.append("A {} stood close to the {}.")
    texts = [way.format(*pair) for pair in pairs for way in ways]
    alike = belonging(texts, [0] * 15, None).alike
    assert alike is not None and alike.texts >= 10 and alike.of == 15
    assert belonging(texts, [0] * 15, [k // 3 for k in range(15)]).alike is None
    names = ("France", "Norway", "Peru", "Ghana", "Japan", "Cuba")
    for plain in (
        [f"The capital of {name} is" for name in names],
        read("plain").texts,
        ["?", "!", "...", "-"],
        [[1, 2], [1, 3], [4]],
    ):
        assert belonging(plain, [0] * len(plain), None).alike is None


def test_copies_are_equal_up_to_case_space_and_punctuation() -> None:
    same = ["The cat sat.", "the cat sat", " The  cat\u00a0sat!", "THE CAT SAT\n"]
    same.append("\u201cThe cat\u201d sat...")
    assert len({copy_key(text) for text in same}) == 1
    assert copy_key("The cat sat 2.") != copy_key("The cat sat 3.")
    assert copy_key("!!!") != copy_key("???")
    assert copy_key("\u6771\u4eac") != copy_key("\u4eac\u90fd")
    for texts, groups in (
        ([[5, 6], (5, 6), [6, 5]], [0, 0, 1]),
        (["a", "b", "A", "c", "b."], [0, 1, 0, 2, 1]),
    ):
        assert number_groups([copy_key(text) for text in texts]).tolist() == groups


def test_a_compressed_bomb_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "UNSUSPECTED", 2**18)
    for name, unit in (
        ("bomb.txt.gz", b"a"),
        ("bomb.txt.zst", b"a cat sat here.\n"),
        ("bomb.jsonl.zst", b'{"text": "a"}\n'),
    ):
        content = unit * (2**19 // len(unit))
        packed = gzip.compress(content, 9)
        if name.endswith("zst"):
            packed = zstandard.ZstdCompressor().compress(content)
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(FileError, match=r"become more than \d+,\d+, as no text"):
            read(tmp_path / name)


def test_broken_rows_can_be_left_out_and_each_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files_of_texts, "LONGEST_FIELD", 30)
    broken = ['{"te', '{"other": "two"}', "7", '{"text": " "}']
    lines = "\n".join(['{"text": "one"}', *broken, '{"text": "three"}'])
    for name, data, numbers in (
        ("a.txt", b"one\n\xff\xfe\nthree\n", [2]),
        ("long.txt", b"one\n" + b"x" * 99 + b"\nthree\n" + b"y" * 29 + b"\n", [2, 4]),
        ("a.jsonl", lines.encode(), [2, 3, 4, 5]),
        ("a.csv", b'text,label\none,1\ntwo\n"tw"o,2\n,3\nthree,4\n', [3, 4, 5]),
    ):
        skipped: list[TextError] = []
        found = rows(Named(data, name), skipped=skipped.append)
        assert [row.text for row in found] == ["one", "three"]
        problems = [error.problem for error in skipped]
        assert problems == [f"Line {number} of {name}" for number in numbers]


def test_a_line_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"")
    os.truncate(path, 2**27)  # which takes no room on the disk
    with pytest.raises(TextError, match="67,108,864 characters or more"):
        read(path)


@pytest.mark.parametrize(
    ("limit", "said"),
    [("MOST_TEXTS", "10 texts"), ("MOST_CHARACTERS", "10 characters")],
)
def test_a_file_is_not_held_in_memory_beyond_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, said: str
) -> None:
    path = tmp_path / "many.txt"
    path.write_text("a\n" * 11)
    assert len(read(path)) == 11
    monkeypatch.setattr(f"hiddenscope.texts.reader.{limit}", 10)
    held = f"more than {said}, and all of them would be held in memory"
    for source in (path, io.BytesIO(path.read_bytes())):
        with pytest.raises(TooLarge, match=held):
            read(source)
    # Streamed, or in memory already.
    assert len([*rows(path)]) == len(read(["a"] * 11)) == 11


def test_very_many_blank_lines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert files_of_texts.MOST_BLANK == 1_000_000
    monkeypatch.setattr(files_of_texts, "MOST_BLANK", 1000)
    assert len(read(Named(b"a" + b"\n" * 1001 + b"b", "blank.txt"))) == 2
    for kind, end in (("txt", "\n"), ("csv", "\r\n"), ("jsonl", "\n")):
        first = '"text"' if kind == "jsonl" else "text"
        data = f"{first}{end * 1003}a".encode()
        with pytest.raises(
            FileError, match="1,000 blank lines stand before line 1,002"
        ):
            read(Named(data, f"blank.{kind}"))


def parquet_of(path: Path, texts: list[str], **options: Any) -> None:
    columns = {"text": texts, "label": [text[:1] for text in texts]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)


def test_a_parquet_file_gives_the_same_rows_however_it_is_coded(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"text {number % 7} of {'some' * (number % 5)}" for number in range(3000)]
    for coded in (True, False):
        parquet_of(path, texts, use_dictionary=coded, row_group_size=1500)
        found = read(path)
        assert found.texts == tuple(texts)
        assert found.labels == tuple(text[:1] for text in texts)


def test_parquet_bombs_are_refused_or_held_once(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet_of(path, ["a" * 10**7], compression="zstd", use_dictionary=False)
    grown = r"bytes of it become 10,\d{3},\d{3}, as no text does"
    with pytest.raises(FileError, match=grown):
        read(path)
    parquet_of(path, ["b" * 10**5] * 1000, compression="none")
    assert path.stat().st_size < 10**6
    assert len({id(text) for text in read(path).texts}) == 1


def test_a_folder_is_the_files_of_texts_in_it(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "b.csv").write_text("text,label\na cat,x\na dog,y\n")
    (tmp_path / "below" / "a.jsonl").write_text('{"text": "a hat", "label": "x"}\n')
    (tmp_path / "notes.md").write_text("not a text")
    found = hs.read(tmp_path)
    wanted = Labelled(("a cat", "a dog", "a hat"), ("x", "y", "x"), tmp_path.name)
    assert found == hs.read(str(tmp_path)) == wanted
    assert tuple(hs.Corpus(tmp_path).read()) == found.texts
    assert dataset(f"@{tmp_path}") == dataset(str(tmp_path)) == found
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="no file in it ends with"):
        hs.read(tmp_path / "empty")
    (tmp_path / "empty" / "plan.json").touch()
    (tmp_path / "empty" / "commits").mkdir()
    with pytest.raises(FileError, match=r"a store of states.*--states"):
        hs.read(tmp_path / "empty")


def test_a_file_of_lines_can_be_one_text_and_its_folder_the_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviews = {"bad/2.txt": "So dull.\n", "good/1.txt": "A joy.\n\nTwice.\r\n"}
    for name, content in reviews.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content.encode())
    found = hs.read(tmp_path, text="file", label="folder")
    assert found.texts == ("So dull.", "A joy.\n\nTwice.")
    assert found.labels == ("bad", "good")
    assert tuple(hs.Corpus(tmp_path, text="file").read()) == found.texts
    assert dataset(f"@{tmp_path}", "file").texts == found.texts
    # Lines have a folder too.
    assert hs.read(tmp_path, label="folder").labels == ("bad", "good", "good")
    monkeypatch.chdir(tmp_path / "bad")
    assert hs.read("2.txt", label="folder").labels == ("bad",)
    with pytest.raises(TextError, match="No column 'line' in 2.txt"):
        hs.read("2.txt", text="line")
    # No line is that long.
    monkeypatch.setattr(files_of_texts, "LONGEST_FIELD", 12)
    with pytest.raises(TextError, match="it has 12 characters or more"):
        hs.read("../good/1.txt", text="file")
