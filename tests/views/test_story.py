"""The guided page, as somebody opens it: from disk, with no network, every view alive."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_story_is_alive_offline(scheme: str, chromium: Browser, tmp_path: Path) -> None:
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    norms = hs.profile(model, "The cat sat on the mat.")
    path = tmp_path / "story.html"
    hs.story([hs.anatomy(model), norms], path, title="A story", opening="Once.", closing="# Go on")
    page = chromium.new_page(viewport={"width": 1000, "height": 900}, offline=True, color_scheme=scheme)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached")
    assert page.locator(".prose h2").all_inner_texts()[:3] == [
        "What the model computes, and the proof",
        "The size of every state",
        "The same along the layers",
    ]
    grid = page.locator('section[data-view="1"]')
    grid.locator(".stage").focus()
    page.keyboard.press("ArrowRight")
    readout = grid.locator(".readout").inner_text()
    assert "layer.0" in readout
    assert f"{norms.data['norm'].values[0, 0]:.3g}"[:3] in readout
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing hangs out at the side"
    page.close()
    assert [one for one in wrong if not one.startswith("data:")] == []
