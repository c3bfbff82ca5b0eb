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
from hiddenscope.cli.arguments import dataset
from hiddenscope.errors import FileError, TextError, TooLarge
from hiddenscope.texts import (
    Labelled,
    Row,
    belonging,
    copy_groups,
    copy_key,
    read,
    rows,
    shipped,
)
from hiddenscope.texts import files as files_of_texts

TEXTS, LABELS = ("one, two", 'a "quoted" text', "ünï cödé"), ("x", "y", "x")


def as_csv(separator: str = ",") -> str:
    cells = [[text, label] for text, label in zip(TEXTS, LABELS, strict=True)]
    lines = [
        separator.join('"' + cell.replace('"', '""') + '"' for cell in row)
        for row in [["text", "label"], *cells]
    ]
    return "\n".join(lines) + "\n"


def as_jsonl() -> str:
    pairs = zip(TEXTS, LABELS, strict=True)
    return "".join(
        json.dumps({"n": 1, "text": text, "label": label}) + "\n"
        for text, label in pairs
    )


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
    frame().to_parquet(folder / "some.parquet")
    yield folder / "some.parquet"


def frame() -> pandas.DataFrame:
    return pandas.DataFrame({"n": [1, 2, 3], "text": TEXTS, "label": LABELS})


def hub(**columns: Any) -> Any:
    import datasets

    return datasets.Dataset.from_dict(
        {"text": list(TEXTS), "label": list(LABELS), **columns}
    )


def test_every_source_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[Any] = [*files(tmp_path), frame(), hub(), hub().to_iterable_dataset()]
    sources += [
        (TEXTS, LABELS),
        (list(TEXTS), np.array(LABELS)),
        json.loads(f"[{as_jsonl().strip().replace(chr(10), ',')}]"),
    ]
    for source in sources:
        found = read(source)
        assert (found.texts, found.labels) == (TEXTS, LABELS), source
        assert [row.text for row in rows(source)] == list(TEXTS)
    for path in files(tmp_path):
        with path.open("rb") as stream:
            assert read(stream).texts == TEXTS
            assert not stream.closed
        assert read(str(path)).name == "some"
    for name, said in (("-.csv", as_csv()), ("-.jsonl", as_jsonl())):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(said.encode())))
        assert read(name) == Labelled(TEXTS, LABELS, "stdin")


def test_a_gzip_that_is_open_already_is_not_unpacked_twice(tmp_path: Path) -> None:
    path = next(path for path in files(tmp_path) if path.name == "some.jsonl.gz")
    with gzip.open(path, "rb") as stream:
        assert read(stream).texts == TEXTS
    with gzip.open(path, "rt", encoding="utf-8") as text:
        assert read(text, text="text").texts == TEXTS
    mine = io.BytesIO(path.read_bytes())
    assert read(mine, text="text").texts == TEXTS
    assert not mine.closed


def test_lines_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes("\ufefffirst\r\n\r\n  second \nthird".encode())
    assert list(rows(path)) == [
        Row("first", None, 1),
        Row("  second ", None, 3),
        Row("third", None, 4),
    ]
    assert read(path) == Labelled(("first", "  second ", "third"), None, "lines")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    assert read("-").texts == ("one", "two")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(as_jsonl().encode())))
    assert read("-", label="label").labels == LABELS
    assert read(["one", "two"]).labels is None
    assert read(iter(["one"])).texts == ("one",)
    assert read(pandas.Series(["one", "two"])).texts == ("one", "two")
    assert read(("one", "two")).texts == ("one", "two")


def test_two_frames_of_zstandard_are_read_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "two.txt.zst"
    path.write_bytes(zstandard.compress(b"one\n") + zstandard.compress(b"two\n"))
    assert read(path).texts == ("one", "two")


def test_a_quoted_text_of_several_lines_has_the_line_that_it_begins_on(
    tmp_path: Path,
) -> None:
    path = tmp_path / "long.csv"
    path.write_text('text,label\n"one\ntwo",x\n\nthree,y\n')
    assert [(row.text, row.line) for row in rows(path)] == [
        ("one\ntwo", 2),
        ("three", 5),
    ]


# A blank one is refused.
SOME_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    str.strip
)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(SOME_TEXT, st.sampled_from("ab")), min_size=1))
def test_what_was_written_comes_back(pairs: list[tuple[str, str]]) -> None:
    texts, labels = zip(*pairs, strict=True)
    lines = [json.dumps({"text": text, "label": label}) for text, label in pairs]
    assert read(io.BytesIO("\n".join(lines).encode()), text="text") == Labelled(
        texts, labels, "the texts"
    )
    written = io.StringIO(newline="")
    csv.writer(written).writerows([("text", "label"), *pairs])
    assert read(_Named(written.getvalue().encode(), "some.csv")) == Labelled(
        texts, labels, "some"
    )


def test_a_file_may_be_closed_before_all_its_rows_are_read() -> None:
    with io.BytesIO(as_jsonl().encode()) as file:
        begun = rows(file, text="text")
        assert next(begun).text == TEXTS[0]
    begun.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["id", "Sentence", "Class"], ("Sentence", "Class")),
        (["text", "prompt", "label"], ("text", "label")),
        (["review", "target"], ("review", "target")),
        (["review"], ("review", None)),
    ],
)
def test_columns_with_obvious_names_are_found(
    tmp_path: Path, names: list[str], expected: tuple[str, str | None]
) -> None:
    path = tmp_path / "some.csv"
    path.write_text(
        ",".join(names) + "\n" + ",".join(f"the {name}" for name in names) + "\n"
    )
    found = read(path)
    assert (found.texts, found.labels) == (
        (f"the {expected[0]}",),
        expected[1] and (f"the {expected[1]}",),
    )


@pytest.mark.parametrize(
    ("header", "options", "what"),
    [
        ("a,b", {}, "they are 'a', 'b', and none is plainly the text. Name the one"),
        ("prompt,content", {}, "'prompt', 'content' could each be the text"),
        ("text,class,target", {}, "'class', 'target' could each be the label"),
        (
            "text,label",
            {"text": "texts"},
            (
                "No column 'texts' in some.csv: it has 'text', 'label'. Did you mean"
                " 'text'?"
            ),
        ),
        ("text,label", {"label": "zzz"}, "Name one of these."),
        ("text,text", {}, "two are called 'text'"),
        ("text,b", {"label": "text"}, "'text' would be both"),
        ("The cat sat.", {}, "none is plainly the text"),
    ],
)
def test_columns_that_are_not_obvious_are_asked_for(
    tmp_path: Path, header: str, options: dict[str, str], what: str
) -> None:
    path = tmp_path / "some.csv"
    path.write_text(f"{header}\n{','.join('x' for _ in header.split(','))}\n")
    with pytest.raises(TextError, match="some.csv") as error:
        read(path, **options)
    assert what in str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n\n{"text": \n',
            "Line 3 of a.jsonl: it is not JSON",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"texts": "y"}\n',
            "Line 2 of a.jsonl: it has no 'text', only 'texts'",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": 5}\n',
            "Line 2 of a.jsonl: the text is of type int",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": null}\n',
            "Line 2 of a.jsonl: the text is missing",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n[1]\n',
            "Line 2 of a.jsonl: it is of type list and not a row",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\\ud800"}\n',
            "Line 2 of a.jsonl: the text holds half of a character",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": ""}\n',
            "Line 2 of a.jsonl: the text is empty",
        ),
        ("a.jsonl", b"[" * 100_000, "Line 1 of a.jsonl: it is not JSON"),
        (
            "a.txt",
            b"x\n\xff\xfe\n",
            "Line 2 of a.txt: it is not UTF-8 (byte 1 of the line is 0xff)",
        ),
        ("a.csv", b"text,label\nx,1\n\xe4,2\n", "Line 3 of a.csv: it is not UTF-8"),
        (
            "a.csv",
            b"text,label\nx,1\nx,2,3\n",
            "Line 3 of a.csv: it has 3 columns and the header 2 (text, label)",
        ),
        (
            "a.csv",
            b'text,label\nx,1\n"x,2\n',
            "Line 3 of a.csv: it is not a row of values separated by ','",
        ),
        ("a.csv", b"text,label\nx,1\n,2\n", "Line 3 of a.csv: the text is empty"),
        ("a.csv", b"text,label\nx,1\n  ,2\n", "Line 3 of a.csv: the text is empty"),
        (
            "a.csv",
            b"text,label\nx,1\ny,\n",
            "Cannot read the labels of a: row 3 has no label.",
        ),
        ("a.csv", b"", "No texts in 'a.csv': the file holds none. Give at least one."),
        (
            "empty.csv",
            b"text,label\n",
            "No texts in 'empty.csv': the file holds none. Give at least one.",
        ),
        (
            "a.txt.gz",
            gzip.compress(b"x\n" * 999, mtime=0)[:-9],
            "Cannot read a.txt.gz: it cannot be decompressed to the end",
        ),
        (
            "a.txt.gz",
            gzip.compress(b"x\n" * 999, mtime=0)[:-8] + b"12345678",
            "Cannot read a.txt.gz: it cannot be decompressed",
        ),
        (
            "a.txt.zst",
            zstandard.compress(b"x\n" * 999)[:9] + b"no",
            "Cannot read a.txt.zst: it cannot be decompressed",
        ),
        (
            "a.parquet",
            b"nothing",
            "Cannot read a.parquet: it is not a complete parquet",
        ),
        ("a.xml", b"x", "Cannot read texts from "),
    ],
)
def test_what_is_wrong_has_a_number(
    tmp_path: Path, name: str, data: bytes, what: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises((TextError, FileError)) as error:
        read(tmp_path / name)
    assert what in str(error.value)


@pytest.mark.parametrize(
    "suffix", [".csv", ".tsv", ".jsonl", ".parquet", "frame", "dataset"]
)
def test_groups_are_read_from_the_column_that_is_named(
    tmp_path: Path, suffix: str
) -> None:
    table = frame().assign(group=["a", "b", "a"])
    source: Any = tmp_path / f"some{suffix}"
    if suffix == "frame":
        source = table
    elif suffix == "dataset":
        source = hub(**{name: table[name].tolist() for name in table.columns})
    elif suffix == ".parquet":
        table.to_parquet(source)
    elif suffix == ".jsonl":
        table.to_json(source, orient="records", lines=True)
    else:
        table.to_csv(source, index=False, sep="\t" if suffix == ".tsv" else ",")
    assert read(source, group="group").groups == ("a", "b", "a")
    assert [row.group for row in rows(source, group="group")] == ["a", "b", "a"]
    assert read(source).groups is None  # a column that is not named says nothing
    assert read(read(source, group="group")).groups == ("a", "b", "a")
    assert read(source, group=[1, 2, 1]).groups == (1, 2, 1)
    assert read(source, group=np.array([1, 2, 1])).groups == (1, 2, 1)
    assert read(source, label="group", group="group").labels == ("a", "b", "a")


def test_the_unnamed_first_column_of_a_table_is_neither_a_label_nor_a_group(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.csv").write_text(",text\n0,one\n1,two\n")
    assert read(tmp_path / "a.csv") == Labelled(("one", "two"), None, "a")


@pytest.mark.parametrize(
    ("source", "group", "what"),
    [
        (
            TEXTS,
            "topic",
            "No column 'topic' in the list: it has no columns. Give group= a list",
        ),
        ((TEXTS, LABELS), "topic", "No column 'topic' in (texts, labels)"),
        (
            frame(),
            "topic",
            "No column 'topic' in the frame: it has 'n', 'text', 'label'",
        ),
        (
            frame(),
            [1, 2],
            "Cannot read the groups of the texts: there are 3 texts and 2 groups.",
        ),
        (
            frame(),
            [1, 2, None],
            "Cannot read the groups of the texts: row 3 has no group.",
        ),
        (
            frame(),
            [1, None, None],
            (
                "row 2 has no group, like 1 more of 3. Give every text a group, or none"
                " of them."
            ),
        ),
        (frame(), [[1], [2], [3]], "a group is of type list"),
        (frame(), 5, "group is of type int"),
        (frame(), iter([1, 2, 3]), "group is of type list_iterator"),
    ],
)
def test_groups_that_do_not_fit_are_said(source: Any, group: Any, what: str) -> None:
    with pytest.raises(TextError) as error:
        read(list(source) if source is TEXTS else source, group=group)
    assert what in str(error.value)


def test_a_list_of_pairs_has_labels() -> None:
    pairs = list(zip(TEXTS, LABELS, strict=True))
    assert (
        read(pairs)
        == read([list(pair) for pair in pairs])
        == read(iter(pairs))
        == read((TEXTS, LABELS))
    )
    assert read(pairs, group=[0, 1, 0]).groups == (0, 1, 0)
    with pytest.raises(
        TextError,
        match=r"Row 2 of the list: it is of type str and not a \(text, label\) pair",
    ):
        read([("a", 1), "b"])
    with pytest.raises(
        TextError, match="No column 'label' in the list: it has no columns"
    ):
        read(pairs, label="label")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("no/such.csv", "there is no such file"),
        ("cities-incomplet", "Did you mean 'cities-incomplete'?"),
        ("The cat sat on the mat.", "for a single text a list: [text]"),
        ("-.xml", "it names no known format"),
        (5, "the source is of type int"),
        (b"bytes", "the source is of type bytes"),
        ({"text": ["x"]}, "it is a mapping with 'text'"),
        ([], "No texts: the list is empty"),
        ([""], "Row 1 of the list: the text is empty"),
        (["x", 5], "Row 2 of the list: the text is of type int"),
        ([[1, 2]], "Row 1 of the list: it is of type list"),
        (range(10**12), "Row 1 of the list: it is of type int"),
        (
            (range(10**12), range(10**12)),
            "Cannot read (texts, labels): a range has more than 4,294,967,296 items",
        ),
        ((["a", "b"], ["x"]), "there are 2 texts and 1 labels"),
        ((["a"], 5), "Give two lists"),
        ((["a", "b"], ["x", None]), "row 2 has no label"),
        ((["a", "b"], ["x", float("nan")]), "row 2 has no label"),
    ],
)
def test_what_is_no_source_is_said(source: Any, what: str) -> None:
    with pytest.raises((TextError, FileError)) as error:
        read(source)
    assert what in str(error.value)
    assert isinstance(error.value, hs.errors.Error)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".txt"])
def test_a_long_text_is_read_whole(tmp_path: Path, suffix: str) -> None:
    long, limit = "word " * 100_000, csv.field_size_limit()
    header = {".csv": "text\n", ".tsv": "text\n"}.get(suffix, "")
    (tmp_path / f"a{suffix}").write_text(
        header + (json.dumps({"text": long}) if suffix == ".jsonl" else long) + "\n"
    )
    assert read(tmp_path / f"a{suffix}").texts == (long,)
    assert csv.field_size_limit() == limit, (
        "what is the whole process's stays as it was"
    )


def test_what_was_read_is_a_source_and_texts(tiny: Any) -> None:
    data = hs.read(frame(), text="text", label="label")
    assert hs.read(data) == data and [row.label for row in rows(data)] == list(LABELS)
    assert hs.read(hs.read(["a", "b"])).labels is None
    assert list(data) == list(TEXTS) and len(data) == 3
    assert (
        tiny("gpt2").capture(hs.read(["the cat", "a dog"]), "layer.1").tokens.count == 2
    )


def test_splits_columns_and_folders_are_said(tmp_path: Path) -> None:
    import datasets

    with pytest.raises(TextError, match="the splits 'train'.*data\\['train'\\]"):
        read(datasets.DatasetDict({"train": hub()}))
    with pytest.raises(FileError, match="no file in it ends with"):
        read(tmp_path)
    with pytest.raises(TextError, match="it has no columns"):
        read(["a"], text="text")
    with pytest.raises(FileError, match="cannot be streamed"):
        read(_Named(gzip.compress(b"x"), "a.parquet.gz"))


class _Named(io.BytesIO):
    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name


def test_labels_that_have_names_are_given_by_them() -> None:
    import datasets

    data = hub(label=[0, 1, 0]).cast_column(
        "label", datasets.ClassLabel(names=["no", "yes"])
    )
    assert read(data).labels == ("no", "yes", "no")
    assert read(hub(label=[0, 1, 0])).labels == (0, 1, 0)
    assert read((TEXTS, np.array([1, 2, 3]))).labels == (1, 2, 3)


class Endless(io.RawIOBase):
    """The bytes that a generator makes, when they are asked for."""

    def __init__(self, pieces: Iterator[bytes], name: str) -> None:
        self.pieces, self.rest, self.name = pieces, b"", name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.rest and (piece := next(self.pieces, None)) is not None:
            self.rest = piece
        taken, self.rest = self.rest[: len(buffer)], self.rest[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


def test_very_many_rows_in_little_memory() -> None:
    block = gzip.compress(b"a sentence of some length\n" * 1000)
    before, most, count = sys.getallocatedblocks(), 0, 0
    for row in rows(Endless((block for _ in range(200)), "many.txt.gz")):
        count += len(row.text) == 25
        if count % 20_000 == 1:
            most = max(most, sys.getallocatedblocks() - before)
    assert count == 200_000
    assert most < 10_000, "a row is two blocks, so as many rows kept would be 400,000"


def test_the_cities_are_balanced() -> None:
    assert {"cities-complete", "cities-incomplete"} <= set(shipped())
    for name in ("cities-incomplete", "cities-complete"):
        data = read(name)
        assert data.name == name
        assert data.labels is not None
        assert Counter(data.labels) == {"Toronto": 25, "Montreal": 25}
        assert len(set(data.texts)) == 50
        ends = {
            city: Counter(
                t.split()[-1]
                for t, y in zip(data.texts, data.labels, strict=True)
                if y == city
            )
            for city in ("Toronto", "Montreal")
        }
        if name == "cities-incomplete":
            assert ends["Toronto"] == ends["Montreal"]
            assert not any(city in text for text in data.texts for city in ends)
        else:
            assert all(
                text.endswith(".") and city in text
                for text, city in zip(data.texts, data.labels, strict=True)
            )


def test_a_name_that_no_file_system_takes_is_no_file() -> None:
    with pytest.raises(FileError, match="Give a path"):
        read("a long text " * 500)


def test_copies_with_other_labels_are_a_group_and_groups_grow_together() -> None:
    texts = [
        "It rains.",
        "It rains?",
        "it rains",
        "We sold the car.",
        "They bought a house.",
        "It  rains!",
    ]
    found = belonging(texts, ["said", "asked", "said", "said", "asked", "said"], None)
    # The first in the alphabet, wherever it stands.
    assert found.first == [
        False,
        True,
        False,
        True,
        True,
        True,
    ]
    assert found.copies == 2 and found.groups[0] == found.groups[1] == found.groups[5]
    assert (
        len(set(found.texts)) == 4 and len(set(found.groups)) == 3 and not found.grouped
    )
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
    pairs = [
        ("doctor", "hospital"),
        ("train", "station"),
        ("boy", "garden"),
        ("storm", "village"),
        ("king", "castle"),
    ]
    ways = (
        "The {} was near the {}.",
        "Near the {1} was the {0}.",
        "A {} stood close to the {}.",
    )
    texts = [way.format(*pair) for pair in pairs for way in ways]
    alike = belonging(texts, [0] * 15, None).alike
    assert alike is not None and alike.texts >= 10 and alike.of == 15
    assert belonging(texts, [0] * 15, [k // 3 for k in range(15)]).alike is None
    template = [
        f"The capital of {name} is"
        for name in ("France", "Norway", "Peru", "Ghana", "Japan", "Cuba")
    ]
    assert belonging(template, [0] * 6, None).alike is None
    assert belonging(read("plain").texts, [0] * 40, None).alike is None
    assert belonging(["?", "!", "...", "-"], [0] * 4, None).alike is None
    assert belonging([[1, 2], [1, 3], [4]], [0] * 3, None).alike is None


def test_copies_are_equal_up_to_case_space_and_punctuation() -> None:
    same = [
        "The cat sat.",
        "the cat sat",
        " The  cat\u00a0sat!",
        "\u201cThe cat\u201d sat...",
        "THE CAT SAT\n",
    ]
    assert len({copy_key(text) for text in same}) == 1
    assert copy_key("The cat sat 2.") != copy_key("The cat sat 3.")
    assert copy_key("!!!") != copy_key("???")
    assert copy_key("\u6771\u4eac") != copy_key("\u4eac\u90fd")
    assert copy_groups([[5, 6], (5, 6), [6, 5]]) == [0, 0, 1]
    assert copy_groups(["a", "b", "A", "c", "b."]) == [0, 1, 0, 2, 1]


BOMBS = [
    ("gz", b"a"),
    ("zst", b"a cat sat here.\n"),
    ("gz", b"\n"),
    ("zst", b'{"text": "a"}\n'),
]


@pytest.mark.parametrize(("kind", "unit"), BOMBS)
def test_a_compressed_bomb_is_refused(tmp_path: Path, kind: str, unit: bytes) -> None:
    content = unit * (2**23 // len(unit))
    path = tmp_path / f"bomb.{'jsonl' if unit.startswith(b'{') else 'txt'}.{kind}"
    path.write_bytes(
        gzip.compress(content, 9)
        if kind == "gz"
        else zstandard.ZstdCompressor().compress(content)
    )
    with pytest.raises(
        FileError,
        match=r"become more than 4,\d{3},\d{3}, as no text does|1,000,000 blank lines",
    ):
        read(path)


@pytest.mark.parametrize(
    ("name", "data", "lines"),
    [
        ("a.txt", b"one\n\xff\xfe\nthree\n", [2]),
        (
            "a.jsonl",
            (
                b'{"text": "one"}\n{"te\n{"other": "two"}\n7\n{"text": " "}\n{"text":'
                b' "three"}\n'
            ),
            [2, 3, 4, 5],
        ),
        ("a.csv", b'text,label\none,1\ntwo\n"tw"o,2\n,3\nthree,4\n', [3, 4, 5]),
    ],
)
def test_broken_rows_can_be_left_out_and_each_is_named(
    tmp_path: Path, name: str, data: bytes, lines: list[int]
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    skipped: list[TextError] = []
    assert [row.text for row in rows(path, skipped=skipped.append)] == ["one", "three"]
    assert [error.problem for error in skipped] == [
        f"Line {line} of {name}" for line in lines
    ]


def test_a_line_that_is_too_long_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_of_texts, "LONGEST_FIELD", 10)
    path = tmp_path / "long.txt"
    path.write_text("one\n" + "x" * 35 + "\nthree\n" + "y" * 9 + "\nfive\n")
    skipped: list[TextError] = []
    assert [row.text for row in rows(path, skipped=skipped.append)] == [
        "one",
        "three",
        "five",
    ]
    assert [error.problem for error in skipped] == [
        "Line 2 of long.txt",
        "Line 4 of long.txt",
    ]


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
    for source in (path, io.BytesIO(path.read_bytes())):
        with pytest.raises(
            TooLarge, match=f"more than {said}, and all of them would be held in memory"
        ):
            read(source)
    # Streamed, or in memory already.
    assert len([*rows(path)]) == len(read(["a"] * 11)) == 11


@pytest.mark.parametrize(
    ("kind", "end"), [("txt", "\n"), ("csv", "\r\n"), ("jsonl", "\n")]
)
def test_a_million_blank_lines_are_refused(tmp_path: Path, kind: str, end: str) -> None:
    path = tmp_path / f"blank.{kind}"
    path.write_text(
        ("text" if kind == "csv" else '"text"') + end * 1_000_003 + "a", newline=""
    )
    with pytest.raises(
        FileError, match="1,000,000 blank lines stand before line 1,000,002"
    ):
        read(path)


def parquet_of(path: Path, texts: list[str], **options: Any) -> None:
    columns = {"text": texts, "label": [text[:1] for text in texts]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)


@pytest.mark.parametrize("dictionary", [True, False])
def test_a_parquet_file_gives_the_same_rows_however_it_is_coded(
    tmp_path: Path, dictionary: bool
) -> None:
    texts = [f"text {number % 7} of {'some' * (number % 5)}" for number in range(3000)]
    parquet_of(
        tmp_path / "a.parquet", texts, use_dictionary=dictionary, row_group_size=1500
    )
    found = read(tmp_path / "a.parquet")
    assert found.texts == tuple(texts)
    assert found.labels == tuple(text[:1] for text in texts)


def test_parquet_bombs_are_refused_or_held_once(tmp_path: Path) -> None:
    parquet_of(
        tmp_path / "a.parquet", ["a" * 10**7], compression="zstd", use_dictionary=False
    )
    with pytest.raises(
        FileError, match=r"bytes of it become 10,\d{3},\d{3}, as no text does"
    ):
        read(tmp_path / "a.parquet")
    parquet_of(tmp_path / "b.parquet", ["b" * 10**6] * 1000, compression="none")
    assert (tmp_path / "b.parquet").stat().st_size < 10**7
    assert len({id(text) for text in read(tmp_path / "b.parquet").texts}) == 1


def test_a_folder_is_the_files_of_texts_in_it(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "b.csv").write_text("text,label\na cat,x\na dog,y\n")
    (tmp_path / "below" / "a.jsonl").write_text('{"text": "a hat", "label": "x"}\n')
    (tmp_path / "notes.md").write_text("not a text")
    read = hs.read(tmp_path)
    assert read == hs.read(str(tmp_path))
    assert (read.texts, read.labels, read.name) == (
        ("a cat", "a dog", "a hat"),
        ("x", "y", "x"),
        tmp_path.name,
    )
    assert tuple(hs.Corpus(tmp_path).read()) == read.texts
    assert dataset(f"@{tmp_path}") == dataset(str(tmp_path)) == read
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="no file in it ends with"):
        hs.read(tmp_path / "empty")
