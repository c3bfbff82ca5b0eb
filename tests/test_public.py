"""The public namespace is flat, whole and honest."""

import subprocess
import sys

import pytest

import hiddenscope as hs


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [name for name in hs.__all__ if name != "__version__"])
def test_every_public_name_is_ours_and_says_what_it_is(name: str) -> None:
    value = getattr(hs, name)
    assert value.__doc__
    assert getattr(value, "__module__", value.__name__).startswith("hiddenscope")
    assert name in dir(hs)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hs.nothing  # type: ignore[attr-defined]


def test_importing_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "pandas", "xarray", "rich"}
    loaded = run("import hiddenscope, sys; print(*sys.modules)").split()
    assert not heavy & set(loaded)


ROOM, ANALYSIS = "from hiddenscope.anatomy import Anatomy", "from hiddenscope.analyses.anatomy import anatomy"


@pytest.mark.parametrize("steps", [(ROOM, ANALYSIS), (ANALYSIS, ROOM)], ids=["room first", "analysis first"])
def test_anatomy_is_the_analysis_whatever_was_imported_before(steps: tuple[str, str]) -> None:
    same = "assert hs.anatomy.__module__ == 'hiddenscope.analyses.anatomy', hs.anatomy"
    first, second = steps
    run("; ".join(["import hiddenscope as hs", first, same, second, same, "import hiddenscope.anatomy", same]))
