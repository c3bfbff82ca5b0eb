"""A served workbench: started as somebody starts it, asked over HTTP, and stopped."""

import signal
from pathlib import Path

import pytest

from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.workbench.serving import SECONDS, served


@pytest.mark.smoke
def test_a_served_workbench_answers_whoever_has_the_token_and_stops(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tiny"
    tiny_model("llama").save_pretrained(folder)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(folder)
    with served(tmp_path, "--no-open", "--root", str(tmp_path)) as server:
        bench = server.bench
        assert bench.raw("GET", "/api/models").status == 401
        assert bench.raw("GET", f"/?token={bench.settings.token}").status == 303
        answer = bench.answer("grid", bench.folder("tiny"), text="The rest")
        assert "hs.profile(" in answer["python"]
        assert bench.views(answer)[0].title == "The norm of every state of tiny"
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(SECONDS) in (0, 130)
