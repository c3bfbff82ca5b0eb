"""A series that is killed goes on where it was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer

KILLED = """
import sys
import hiddenscope as hs
hs.series(sys.argv[2:], "profile", ["The cats sat on the mat."], to=sys.argv[1])
"""


def test_a_job_that_is_killed_loses_one_member_at_most(tmp_path: Path) -> None:
    """Kill a real process with signal 9 as soon as some members are kept."""
    members = []
    for seed in range(3):
        module: Any = tiny_model("llama", seed=seed)
        members.append(str(tmp_path / f"seed{seed}"))
        module.save_pretrained(members[-1])
        tiny_tokenizer().save_pretrained(members[-1])
    texts = ["The cats sat on the mat."]
    whole = hs.series(members, "profile", texts)
    for wanted in (1, 2):
        to = tmp_path / f"kept{wanted}"
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(to), *members])
        try:
            while len(list(to.glob("*.member.json"))) < wanted:
                assert process.poll() in (None, 0)
                if process.poll() is not None:
                    break
                time.sleep(0.002)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
        kept = {path: path.stat().st_mtime_ns for path in to.glob("*.nc")}
        assert len(kept) >= wanted
        assert hs.series(members, "profile", texts, to=to).equals(whole)
        records = list(to.glob("*.member.json"))
        assert len(records) == 3
        unchanged = [path for path in kept if path.stat().st_mtime_ns == kept[path]]
        assert len(unchanged) >= wanted, "what was kept is not computed again"
