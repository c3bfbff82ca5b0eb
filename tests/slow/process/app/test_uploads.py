"""A table of one's own: its columns are shown, and the texts, labels and groups are
chosen from lists.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import hiddenscope as hs
from tests.workbench.pages import Opener, fragment
from tests.workbench.serving import Bench, computed, same

ROWS = [
    ("the rest is", "good"),
    ("the test was", "bad"),
    ("the real one", "good"),
    ("they take it", "bad"),
]
REVIEWS = "review,sentiment,author\n" + "".join(
    f"{text} {number},{label},writer {number % 3}\n"
    for number in range(3)
    for text, label in ROWS
)


def table(bench: Bench, file: str, content: str | bytes) -> dict[str, Any]:
    body = content.encode() if isinstance(content, str) else content
    answer = bench.ask("POST", f"/api/tables?file={file}", body)
    assert answer.status == 200, answer.body
    read: dict[str, Any] = answer.json
    return read


def test_the_columns_and_first_rows_of_a_table_are_read(bench: Bench) -> None:
    read = table(bench, "reviews.csv", REVIEWS)
    assert read["columns"] == ["review", "sentiment", "author"] and not read["certain"]
    assert (
        read["rows"][0] == ["the rest is 0", "good", "writer 0"]
        and len(read["rows"]) == 5
    )
    assert read["likely"]["text"] == "review"
    described = [
        (one["name"], one["kind"], one["required"]) for one in read["parameters"]
    ]
    assert described == [
        ("text", "choice", True),
        ("label", "choice", False),
        ("group", "choice", False),
    ]
    assert all(
        one["choices"] == read["columns"] and one["help"] for one in read["parameters"]
    )


@pytest.mark.parametrize(
    ("file", "content", "columns"),
    [
        ("a.csv", "text,label\nThe rest.,a\n", ["text", "label"]),
        ("a.tsv", "text\tlabel\nThe rest.\ta\n", ["text", "label"]),
        (
            "a.jsonl",
            '{"text": "The rest.", "label": 1, "parts": [1]}\n',
            ["text", "label", "parts"],
        ),
        ("a.txt", "The rest.\n", []),
        ("a.jsonl", "[1, 2]\n{", []),
        ("a.csv", b"\x00\xff\x01", []),
        ("a.csv", "", []),
    ],
)
def test_a_table_of_any_kind_is_looked_at(
    bench: Bench, file: str, content: str | bytes, columns: list[str]
) -> None:
    """What cannot be read has no columns here; whoever uploads it is told why."""
    assert table(bench, file, content)["columns"] == columns


def test_a_file_of_another_kind_is_refused(bench: Bench) -> None:
    answer = bench.ask("POST", "/api/tables?file=rows.exe", b"MZ")
    assert answer.status == 422 and "not a known format" in answer.json["detail"]


def test_groups_of_an_upload_reach_the_analysis_and_its_code(
    bench: Bench, tiny_name: str, here: Path
) -> None:
    (here / "reviews.csv").write_text(REVIEWS)
    named = "text=review&label=sentiment&group=author"
    upload = bench.ask(
        "POST", f"/api/datasets?file=reviews.csv&{named}", REVIEWS.encode()
    ).json
    assert upload["groups"] == 3 and upload["labels"] == {"good": 6, "bad": 6}
    assert upload["columns"] == {
        "text": "review",
        "label": "sentiment",
        "group": "author",
    }
    options = {"method": "pca", "sites": "layer.1"}
    answer = bench.answer("project", tiny_name, data=upload["name"], **options)
    result = computed(bench, answer["id"], here)
    data = hs.read(
        here / "reviews.csv", text="review", label="sentiment", group="author"
    )
    direct = hs.project(
        hs.load(bench.settings.root / "models" / "tiny"), data, **options
    )  # type: ignore[operator, arg-type]
    assert same(result, direct)
    exec(answer["python"].replace("project.html", "python.nc"), {})
    assert same(hs.Result.load(here / "python.nc"), direct)
    assert "--group author" in answer["command"]


def test_columns_are_chosen_from_lists(
    look: Opener, tiny_name: str, tmp_path: Path
) -> None:
    """None of them is called text, which is no reason to refuse the file."""
    shown = look(fragment(tab="data", model=tiny_name))
    file = tmp_path / "opinions.csv"
    file.write_text(REVIEWS.replace("the rest is 0", "<img src=x onerror=alert(1)>"))
    page = shown.page
    page.get_by_label("Upload a dataset").set_input_files(file)
    columns = page.locator("section.columns")
    columns.get_by_role("columnheader", name="sentiment").wait_for()
    assert columns.get_by_text("<img src=x onerror=alert(1)>").count() == 1
    text, label, group = columns.locator("select").all()
    assert text.input_value() == "review"
    label.select_option("sentiment")
    group.select_option("author")
    columns.get_by_role("button", name="Use these columns").click()
    card = page.get_by_role("button", name="opinions.csv")
    card.wait_for()
    assert card.get_attribute("aria-pressed") == "true"
    assert (
        "3 groups" in card.inner_text()
        and "text: review, label: sentiment, group: author" in card.inner_text()
    )
    shown.keep("workbench-columns")


def test_a_table_whose_names_say_it_all_is_taken_at_once(
    look: Opener, tiny_name: str, tmp_path: Path
) -> None:
    shown = look(fragment(tab="data", model=tiny_name))
    file = tmp_path / "plain.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS
        )
    )
    shown.page.get_by_label("Upload a dataset").set_input_files(file)
    shown.page.get_by_role("button", name="plain.jsonl").wait_for()
    chosen = [
        one.input_value() for one in shown.page.locator("section.columns select").all()
    ]
    assert chosen == ["text", "label", ""]
