"""The page in a real browser when something breaks: it says what happened, and the next
question works.
"""

import json
import os
import signal
import sys

import pytest

from hiddenscope.app import jobs
from tests.slices import long
from tests.workbench.asking import SLOW
from tests.workbench.pages import Opener, fragment
from tests.workbench.serving import Bench, limited, linux

if sys.platform == "linux":
    import resource


# tests/app/test_jobs.py does it without a browser.
@long
def test_a_browser_that_goes_away_in_the_middle_of_a_job_leaves_the_way_free(
    look: Opener, bench: Bench, tiny_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = look(
        fragment(
            tab="ask",
            word="visibility",
            model=tiny_name,
            q=json.dumps(SLOW | {"seed": 6}),
        )
    )
    gone.page.get_by_role("button", name="Cancel").wait_for()
    # Not for the next visitor, whose page is loaded again at once.
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "GRACE_SECONDS", 0.5)
        gone.page.close()
        bench.answer("grid", tiny_name, text="Behind the page that went away")
    shown = look(fragment(model=tiny_name, a="The next visitor", overlay="norm"))
    shown.heading("The norm")


@long
def test_a_killed_worker_is_said_and_the_next_question_works(
    look: Opener, bench: Bench, tiny_name: str
) -> None:
    shown = look(
        fragment(
            tab="ask",
            word="visibility",
            model=tiny_name,
            q=json.dumps(SLOW | {"seed": 7}),
        )
    )
    shown.page.get_by_role("button", name="Cancel").wait_for()
    shown.until(
        "() => document.querySelector('#status').textContent.includes('Looking back')"
    )
    os.kill(bench.worker.pid, signal.SIGKILL)
    shown.page.get_by_role("alert").get_by_text("The worker was killed").wait_for()
    look(fragment(model=tiny_name, a="After the kill", overlay="norm")).heading(
        "The norm"
    )


@linux
def test_a_disk_that_fills_is_said_beside_the_grid(
    look: Opener, tiny_name: str
) -> None:
    shown = look(fragment(model=tiny_name, a="There is room", overlay="norm"))
    shown.heading("The norm")
    with limited(os.getpid(), resource.RLIMIT_FSIZE, 2_000):
        shown.page.get_by_label("Text A").fill("There is no room any more")
        shown.page.locator("#status").get_by_text(
            "could not be kept on disk"
        ).wait_for()
    shown.heading("The norm")
    shown.page.get_by_label("Text A").fill("There is room again and more")
    shown.until(
        "() => document.querySelector('.grid"
        " .window')?.getAttribute('aria-label')?.includes('20 tokens')"
    )
