"""A hub id: fetched as far as it is needed, from the cache when the hub is away,
quickly refused otherwise.
"""

import hashlib
import http.server
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from transformers import LlamaForCausalLM

from hiddenscope.errors import UnknownModel, Unreachable, Unsafe
from hiddenscope.loading import open_source
from tests.folders import tiny_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub")
    )
    return tmp_path / "hub"


def test_a_model_in_the_cache_loads_without_the_hub(
    saved_llama: Path, hub_cache: Path, no_network: list[object]
) -> None:
    home = hub_cache / "models--org--tiny"
    shutil.copytree(saved_llama, home / "snapshots" / COMMIT)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    loaded = open_source("org/tiny")
    assert (loaded.name, loaded.revision) == ("org/tiny", COMMIT)
    assert type(loaded.module) is LlamaForCausalLM
    assert any("local cache" in note for note in loaded.notes)


def test_without_hub_and_cache_it_fails_at_once(
    hub_cache: Path, no_network: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    # As a client does that tries again and again.
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(Unreachable, match=r"org/tiny.*not in the local cache.*smollm2"):
        open_source("org/tiny")
    assert waits == [] and len(no_network) <= 2


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's interface as a client needs to fetch a model."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/org/tiny/tree"):
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size}
                for file in sorted(self.folder.iterdir())
            ]
            self.answer_json([{**file, "oid": COMMIT} for file in files])
        elif self.path.startswith("/api/models/org/tiny"):
            names = [file.name for file in sorted(self.folder.iterdir())]
            files = [{"rfilename": file} for file in (*names, "onnx/model.onnx")]
            self.answer_json({"id": "org/tiny", "sha": COMMIT, "siblings": files})
        elif (
            self.path.startswith("/org/tiny/resolve/") and (self.folder / name).exists()
        ):
            content = (self.folder / name).read_bytes()
            etag = hashlib.sha256(content).hexdigest()
            self.answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        elif self.path.startswith("/api/models/org/gated"):
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def answer_json(self, content: object) -> None:
        headers = {"Content-Type": "application/json"}
        self.answer(200, json.dumps(content).encode(), headers)

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(
    tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[Hub]]:
    class OwnHub(Hub):
        folder = tmp_path / "served"
        asked: list[str] = []  # noqa: RUF012

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OwnHub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template
    )
    yield OwnHub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("shard_size", ["5GB", "5KB"])
def test_only_what_is_read_is_fetched(hub: type[Hub], shard_size: str) -> None:
    tiny_llama().save_pretrained(hub.folder, max_shard_size=shard_size)
    (hub.folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (hub.folder / "evil.py").write_text("raise SystemExit")
    (hub.folder / "consolidated.safetensors").write_bytes(b"the same again")
    loaded = open_source("org/tiny")
    assert loaded.revision == COMMIT and type(loaded.module) is LlamaForCausalLM
    fetched = {path.rpartition("/")[2] for path in hub.asked}
    unread = {"pytorch_model.bin", "evil.py", "consolidated.safetensors", "model.onnx"}
    assert not fetched & unread


def test_a_pickle_on_the_hub_is_not_even_fetched(hub: type[Hub]) -> None:
    hub.folder.mkdir()
    (hub.folder / "config.json").write_text("{}")
    (hub.folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(Unsafe, match=r"pytorch_model\.bin"):
        open_source("org/tiny")
    assert len(hub.asked) == 1


def test_a_model_that_the_hub_has_not(hub: type[Hub]) -> None:
    with pytest.raises(UnknownModel, match="no such model"):
        open_source("org/nothing")
    with pytest.raises(Unreachable, match="hf auth login"):
        open_source("org/gated")
