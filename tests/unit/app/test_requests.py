"""Requests: what a page may ask, what is refused in a sentence, and the forms that ask
it.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hiddenscope.app.application import explain
from hiddenscope.app.schemas import ASKED, REQUESTS, JobRequest, analyses, form_field
from hiddenscope.catalog import ANALYSES
from hiddenscope.interface import Parameter
from tests.places import ROOT
from tests.workbench.asking import QUESTIONS, TEXT
from tests.workbench.serving import Bench

# Words of pydantic, and its names for places and types.
PYDANTIC = re.compile(
    r"should|pattern|[Ii]nput|valid |permitted|constrained|arguments\.|\^\(|"
    "cannot be understood"
)
STORE = "store:0123456789abcdef"
CELL = {"text": TEXT, "site": "layer.1", "token": 0}
TAKEN = TypeAdapter(JobRequest)
# The smallest and the largest that a page may send, and what is beyond them.
LIMITS: list[tuple[str, str, list[Any], list[Any]]] = [
    ("lens", "texts", ["x" * 20_000, ["x"] * 2_000], ["", [], ["x"] * 2_001, 5]),
    ("lens", "k", [-(10**6), 10**6], [-(10**6) - 1, 10**6 + 1, "5", 1.5]),
    ("lens", "sites", ["layer.*, final", "x" * 200], ["x" * 201, "a/b", ""]),
    ("probe", "data", ["upload:0123456789abcdef", "a-b_1"], ["../x.csv", "upload:1"]),
    (
        "features",
        "dictionary",
        ["neurons", "pca", "random", "dictionary:0123456789abcdef"],
        ["../sae", "/etc", "dictionary:xyz", "other", ""],
    ),
    ("embed", "pool", ["first", "cls", -1], ["3", "middle", 1.5, True, 10**9]),
    ("embed", "normalize", [True], [1, "yes"]),
    ("grid", "text", ["x" * 20_000], ["", "x" * 20_001, None]),
    ("reads", "token", [0, 20_000], [-1, 20_001]),
    ("state", "site", ["encoder.layer.1.mid", "x" * 40], ["", "x" * 41, "A", "../x"]),
    ("state", "token", [0, 20_000], [-1, 20_001, "1"]),
    (
        "state",
        "change",
        [{"kind": "steer", "strength": -1e6}, {"kind": "replace", "token": 0}],
        [
            {"kind": "x"},
            {"kind": "steer", "strength": 1e6 + 1},
            {"kind": "ablate", "x": 1},
            {"kind": "add", "feature": -1},
            {"kind": "scale", "feature": 1.5},
            # A feature is one of a dictionary.
            {"kind": "add", "feature": 1},
        ],
    ),
    (
        "continuation",
        "change",
        [],
        [{"kind": "scale", "feature": 10**9 + 1}, {"kind": "add"}],
    ),
    ("continuation", "new_tokens", [1, 60], [0, 61]),
    ("answers", "b", ["x"], [""]),
    ("store", "k", [1, 100], [0, 101]),
    ("store", "store", [STORE], ["store:xyz", "/etc", STORE + "0"]),
    ("kept", "text", [0, 10**12], [-1, 10**12 + 1]),
    ("nearest", "token", [0, 10**7], [-1, 10**7 + 1]),
    ("nearest", "k", [1, 100], [0, 101]),
]
LEAST: dict[str, dict[str, Any]] = {
    "lens": {"texts": TEXT},
    "features": {"texts": TEXT},
    "embed": {"texts": TEXT},
    "probe": {"data": "a"},
    "grid": {"text": TEXT},
    "reads": {"text": TEXT},
    "state": CELL,
    "continuation": CELL,
    "answers": {"a": TEXT, "b": TEXT},
    "store": {"store": STORE, "query": TEXT},
    "kept": {"store": STORE, "text": 0},
    "nearest": {"store": STORE, **CELL, "text": 0},
}


def request(word: str, **arguments: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"analysis": word, "arguments": arguments}
    if "model" in REQUESTS[word].model_fields:
        asked["model"] = {"name": "smollm2"}
    return asked


@pytest.mark.parametrize(("word", "name", "good", "bad"), LIMITS)
def test_a_request_holds_what_it_may_and_no_more(
    word: str, name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        asked = request(word, **LEAST[word] | {name: value})
        read = TAKEN.validate_python(asked).model_dump(exclude_unset=True)
        assert read == asked
    for value in bad:
        with pytest.raises(ValidationError, match=name) as refused:
            TAKEN.validate_python(request(word, **LEAST[word] | {name: value}))
        problems = [
            {**one, "loc": ("body", *one["loc"])} for one in refused.value.errors()
        ]
        assert not PYDANTIC.search(explain(problems))


def test_a_request_names_a_model_or_a_store() -> None:
    good = {"folder:0123456789abcdef", "smollm2", "some-body/some_thing.v2", "x" * 96}
    bad = {"../x", "/etc", "a/b/c", "", "x" * 97, "a b", ".hidden", "folder:xyz"}
    for name in good | bad:
        asked = request("lens", texts="x") | {"model": {"name": name}}
        if name in good:
            TAKEN.validate_python(asked)
        else:
            with pytest.raises(ValidationError, match="name"):
                TAKEN.validate_python(asked)
    alone = {"analysis": "profile", "arguments": {}}
    for source in ({"model": {"name": "a"}, "store": STORE}, {}):
        with pytest.raises(ValidationError, match="either a model or a store"):
            TAKEN.validate_python(alone | source)
    TAKEN.validate_python(alone | {"store": STORE})
    # Lens reads no kept states, and a store is asked without a model.
    for wrong in (
        {"analysis": "lens", "arguments": {"texts": "x"}, "store": STORE},
        request("kept", **LEAST["kept"]) | {"model": {"name": "a"}},
        request("lens", texts="x") | {"model": {"name": "a", "dtype": "int8"}},
    ):
        with pytest.raises(ValidationError):
            TAKEN.validate_python(wrong)


def test_a_bad_request_is_refused_in_a_sentence(bench: Bench) -> None:
    lens = {"analysis": "lens", "model": {"name": "x"}}
    probe = {"analysis": "probe", "model": {"name": "x"}}
    long_names = [str(number) + "x" * 10_000 for number in range(9)]
    nowhere = {"model": {"name": "folder:0123456789abcdef"}}
    for asked, said in (
        ([], "understood"),
        ({"analysis": "nothing", **nowhere, "arguments": {}}, "analysis"),
        ({**lens, "arguments": {"texts": "x", "lens": "/etc/passwd"}}, "lens"),
        ({**lens, "arguments": {"texts": "x" * 20_001}}, "more than 20,000 characters"),
        (
            {**lens, "arguments": {}, "model": {"name": "../x"}},
            "“model” cannot be '../x'",
        ),
        ({"analysis": "profile", "arguments": {}}, "either a model or a store"),
        ({**lens, **nowhere, "arguments": {"texts": "x"}}, "below"),
        ({**probe, "arguments": {"data": "nothing"}}, "No dataset"),
        ({"analysis": "x" * 10**6, **nowhere, "arguments": {}}, "analysis"),
        ({**lens, "arguments": dict.fromkeys(long_names, 1)}, "“0xx"),
    ):
        answer = bench.ask("POST", "/api/jobs", asked)
        assert answer.status == 422 and said in answer.json["detail"]
        assert len(answer.body) < 3_000
        assert said == "understood" or not PYDANTIC.search(answer.json["detail"])
    for method, path, said in (
        ("GET", "/api/results/xyz", "“id” cannot be 'xyz'."),
        ("GET", f"/api/stores/{STORE}/texts?first=x", "“first” must be a whole number"),
        ("GET", f"/api/stores/{STORE}/texts?count=101", "“count” must be at most 100"),
        ("POST", "/api/tables", "“file” is missing."),
    ):
        assert said in bench.ask(method, path, b"").json["detail"]
    assert bench.ask("POST", "/api/jobs", b'{"x": "\\ud800"}').status == 422
    assert bench.ask("POST", "/api/jobs", b"{").status in (400, 422)


def test_every_analysis_has_a_form_that_asks_for_what_its_request_takes() -> None:
    listed = {one.word: one for one in analyses()}
    assert list(listed) == [analysis.word for analysis in ASKED]
    assert set(listed) == set(QUESTIONS)
    for word, one in listed.items():
        fields = REQUESTS[word].model_fields["arguments"].annotation.model_fields  # type: ignore[union-attr]
        assert [field.name for field in one.parameters] == list(fields)
        assert one.on_states == ("store" in REQUESTS[word].model_fields)
        for field in one.parameters:
            assert field.required == fields[field.name].is_required()
            assert field.label
    (contrast,) = [one for one in listed["patch"].parameters if one.fields]
    assert [field.name for field in contrast.fields] == [
        "clean",
        "corrupt",
        "answer",
        "other",
    ]
    assert all(field.required for field in contrast.fields)


def test_the_docs_say_which_analyses_the_page_has_not() -> None:
    left_out = " and ".join(f"`{one.word}`" for one in ANALYSES if not one.in_app)
    told = " ".join((ROOT / "docs" / "serve.md").read_text("utf-8").split())
    assert told.count(f"except {left_out}") == 2


def test_a_form_asks_as_a_parameter_says() -> None:
    needed = Parameter("needed", "word", "A.", required=True, aside=True)
    extra = Parameter("extra_word", "word", "B.", default="x", aside=True)
    whole = Parameter("x", "contrast", "C.", default=(1, 2), fields=(needed, extra))
    shown = form_field(replace(whole, form_help="In a form.", of_model=True))
    assert (shown.label, shown.help, shown.default) == ("X", "In a form.", None)
    assert [field.name for field in shown.fields] == ["needed"] and not shown.of_states
    # A value that needs nothing has options.
    (field,) = form_field(replace(whole, fields=(extra,))).fields
    assert (field.label, field.help, field.default) == ("Extra word", "B.", "x")
    assert field.aside and field.of_states and not form_field(needed).aside
