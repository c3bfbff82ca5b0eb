"""A job that is killed in the middle goes on, and ends with the same store."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hiddenscope as hs
from hiddenscope.store import verify
from hiddenscope.testing import tiny_model, tiny_tokenizer
from labs.chaos.kills import files_of, texts
from tests.places import ROOT

JOB = """
import sys
import hiddenscope as hs
from labs.chaos.kills import texts
from hiddenscope.testing import tiny_model, tiny_tokenizer
model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
hs.extract(model, texts(200), sys.argv[1], engine=hs.Engine(unit_tokens=50, threads=1))
"""


@pytest.mark.smoke
def test_a_job_that_is_killed_and_resumed_makes_the_same_store(tmp_path: Path) -> None:
    store, commits = tmp_path / "store", tmp_path / "store" / "commits"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, str(store)], cwd=ROOT, env=environment
    )
    while not commits.is_dir() or len(list(commits.glob("0*.json"))) < 2:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    begun = hs.open(store)
    assert 2 <= len(begun.units) < len(begun.plan.units)
    assert verify(store).intact
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    engine = hs.Engine(unit_tokens=50, threads=1)
    for folder in (store, tmp_path / "whole"):
        assert hs.extract(model, texts(200), folder, engine=engine).complete
    assert files_of(store) == files_of(tmp_path / "whole")
