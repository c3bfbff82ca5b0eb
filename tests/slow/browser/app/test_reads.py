"""What a token reads, as an overlay of the workbench's grid."""

import base64
import json

import numpy as np
import pytest
from playwright.sync_api import Request, Route

from hiddenscope.app.answers import pack_result
from hiddenscope.app.code import as_command, as_python
from hiddenscope.app.reads import reads_of, title_of_reads
from hiddenscope.catalog import ANALYSIS
from hiddenscope.errors import SiteError
from hiddenscope.views import Grid, pack, unpack, views_of
from tests.pages.inside import EVIL, SENTENCE, attention, contributions, known_kinds
from tests.workbench.pages import Opener, Workbench, fragment
from tests.workbench.serving import Bench

A = "The rest is here"
OFFERED = "attention" in ANALYSIS


def test_a_cell_is_the_largest_and_the_mean_weight_over_heads() -> None:
    result = attention(6, 4, missing=[(2, 1)])
    reads = reads_of(result, 5).data
    row = result.data.isel(query=5)
    for name in ("pattern", "weighted"):
        weights = row[name].to_numpy()
        largest, mean = reads[f"largest_{name}"], reads[f"mean_{name}"]
        assert largest.dims == mean.dims == ("site", "token")
        np.testing.assert_array_equal(largest.to_numpy(), np.nanmax(weights, axis=1))
        np.testing.assert_allclose(mean.to_numpy(), np.nanmean(weights, axis=1), 1e-6)
    assert reads["site"].to_numpy().tolist() == [f"layer.{k}" for k in range(1, 7)]
    later = reads["largest_pattern"].to_numpy()[:, 6:]
    assert (later == 0).all(), "a token reads nothing after it"


def test_one_row_is_enough_and_another_token_is_refused() -> None:
    some = attention(3, 2, queries=[4])
    whole = attention(3, 2, queries=range(len(SENTENCE)))
    assert reads_of(some, 4).data["largest_pattern"].shape == (3, len(SENTENCE))
    assert reads_of(whole, 0).data["largest_pattern"].to_numpy()[:, 0].min() == 1
    with pytest.raises(SiteError, match="No attention of token 3"):
        reads_of(some, 3)


def test_the_grid_says_which_weight_it_paints() -> None:
    grid = views_of(reads_of(attention(), 3))[0]
    assert isinstance(grid, Grid)
    assert [measure.name for measure in grid.measures] == [
        "largest weight of any head",
        "mean weight of all heads",
        "largest value-weighted weight of any head",
        "mean value-weighted weight of all heads",
    ]
    assert title_of_reads(attention(), 3).startswith("What “France”, token 3, reads")


def test_hostile_tokens_stay_text_in_the_answer() -> None:
    result = attention(2, 2, EVIL)
    packed = pack_result(reads_of(result, 0), (title_of_reads(result, 0),))
    (grid,) = unpack(packed.payload.decode("ascii"))
    assert isinstance(grid, Grid)
    assert grid.tokens == EVIL
    assert packed.header["columns"] == list(range(len(EVIL)))


def test_as_python_reads_the_chosen_token_alone() -> None:
    request = {
        "analysis": "reads",
        "model": {"name": "smollm2"},
        "arguments": {"text": A, "token": 2},
    }
    assert f"hs.attention(model, {A!r}, queries=[2], draws=0)" in as_python(request, {})
    command = as_command(request, {})
    assert command.text is None and "all tokens, not one" in command.reason


class Answers:
    """Answers the page's questions about attention in place of the server, from
    results that the test makes; everything else goes to the real server.
    """

    def __init__(self, tokens: list[str]) -> None:
        self.result = attention(2, 4, tokens)
        self.asked: list[int | None] = []

    def analyses(self, route: Route) -> None:
        listed = route.fetch().json()
        if not any(one["word"] == "attention" for one in listed):
            listed.append(listed[0] | {"word": "attention"})
        route.fulfill(json=listed)

    def jobs(self, route: Route, request: Request) -> None:
        asked = json.loads(request.post_data or "{}")
        if asked.get("analysis") != "reads":
            return route.fallback()
        token = asked["arguments"].get("token")
        self.asked.append(token)
        job = {"id": "x", "analysis": "reads", "state": "done", "waiting": 0}
        return route.fulfill(json=job | {"result": self.key(token)})

    def key(self, token: int | None) -> str:
        last = len(self.result.data["key"]) - 1
        return f"{last if token is None else token:064x}"

    def results(self, route: Route, request: Request) -> None:
        path = request.url.partition("/api/results/")[2]
        token = int(path[:64], 16) if path[:40] == "0" * 40 else -1
        if token < 0:
            return route.fallback()
        title = title_of_reads(self.result, token)
        packed = pack_result(reads_of(self.result, token), (title,))
        if path.endswith("/payload"):
            assert base64.b64decode(packed.payload)
            return route.fulfill(body=packed.payload, content_type="text/plain")
        empty = {"python": None, "command": None, "command_reason": "", "nearest": []}
        answer = {"id": path, "analysis": "reads", "model": None, **empty}
        others = dict.fromkeys(("state", "continuation", "answers"))
        return route.fulfill(json=answer | others | packed.header)


@pytest.fixture
def reading(look: Opener, bench: Bench, tiny_name: str) -> tuple[Workbench, Answers]:
    """A workbench whose overlay of attention is answered by the test."""
    grid = bench.answer("grid", tiny_name, text=A)
    payload = bench.ask("GET", f"/api/results/{grid['id']}/payload").body.decode(
        "ascii"
    )
    (norms, *_) = unpack(payload)
    assert isinstance(norms, Grid)
    answers = Answers([str(token) for token in norms.tokens])
    shown = look(fragment(model=tiny_name, a=A, overlay="norm"))
    shown.heading("The norm")
    shown.page.route("**/api/analyses", answers.analyses)
    shown.page.route("**/api/jobs", answers.jobs)
    shown.page.route("**/api/results/**", answers.results)
    shown.page.reload()
    shown.heading("The norm")
    return shown, answers


def test_choosing_a_token_paints_what_it_reads(
    reading: tuple[Workbench, Answers],
) -> None:
    shown, answers = reading
    shown.overlay("Attention")
    shown.heading("reads in each layer")
    last = len(answers.result.data["key"]) - 1
    assert f"token {last}," in shown.page.locator(".grid h2").first.inner_text()
    assert (
        "largest weight of any head" in shown.page.locator(".lead.tight").inner_text()
    )
    box = shown.page.locator(".grid canvas.front").bounding_box()
    assert box
    shown.choose(box["width"] * 0.6, 20)
    title = "document.querySelector('.grid h2').textContent"
    shown.until(f"() => !{title}.includes('token {last},')")
    shown.until("() => !document.querySelector('.stale')")
    chosen = answers.asked[-1]
    assert isinstance(chosen, int) and chosen < last
    assert f"token {chosen}," in shown.page.locator(".grid h2").first.inner_text()
    assert f"%7E{chosen}" in shown.fragment
    shown.panel.get_by_text("Nearest states").wait_for()
    names = shown.page.get_by_label("Measure").locator("option").all_inner_texts()
    assert any("value-weighted" in name for name in names)
    shown.keep("overlay-attention")


DRAW = """async (packed) => {
  const { unpack } = await import('/views/static/payload.js');
  const { showViews } = await import('/app/static/result.js');
  const place = document.createElement('div');
  place.className = 'views';
  document.getElementById('work').replaceChildren(place);
  showViews(place, await unpack(packed), 0);
}"""


def test_the_workbench_draws_patterns_and_bars(look: Opener, tiny_name: str) -> None:
    shown = look(fragment(model=tiny_name, a=A, overlay="norm"))
    shown.heading("The norm")
    with known_kinds("attention", "contributions"):
        views = [*views_of(attention(12, 8)), views_of(contributions(12, 8))[0]]
    shown.page.evaluate(DRAW, pack(views))
    shown.settle()
    patterns = shown.page.locator("section.patterns")
    assert patterns.locator(".onehead h3").inner_text() == "layer.7.attn.head.7"
    patterns.locator(".readtoken").nth(3).hover()
    assert "“␣France” token 3 reads" in patterns.locator(".readout").inner_text()
    assert shown.page.locator("section.grid").count() == 2
    shown.keep("workbench-patterns")


@pytest.mark.skipif(not OFFERED, reason="the analysis is not in the catalog")
def test_the_server_answers_with_the_analysis(bench: Bench, tiny_name: str) -> None:
    answer = bench.answer("reads", tiny_name, text=A, token=2)
    assert "token 2, reads in each layer" in answer["views"][0]["title"]
    payload = bench.ask("GET", f"/api/results/{answer['id']}/payload").body.decode(
        "ascii"
    )
    grid = unpack(payload)[0]
    assert isinstance(grid, Grid)
    largest = grid.measures[0].numbers
    assert (largest[:, 3:] == 0).all() and largest[:, :3].max() > 0


def test_the_overlay_is_offered_where_the_analysis_is(
    look: Opener, tiny_name: str
) -> None:
    shown = look(fragment(model=tiny_name, a=A, overlay="norm"))
    shown.heading("The norm")
    radios = shown.page.get_by_role("radio", name="Attention", exact=True)
    assert radios.count() == int(OFFERED)
