"""Faults are drawn by their seed, planted in a copy, and found by the tests."""

from pathlib import PurePosixPath

import pytest

from labs.mutants import report
from labs.mutants.draw import ROOT, Mutant, draw, equivalents
from labs.mutants.entropy.wrong import WRONG, wrong_entropy
from labs.mutants.operators import Fault, faults_in
from labs.mutants.trial import CAUGHT, SURVIVED, Outcome, check_copy, held_against, hold

SOURCE = '''
LIMIT = 3

class Sizes:
    few = 2 < LIMIT

    def largest(self, values, axis=0):
        """Return 1 < 2."""
        if not values and len(values) >= 2:
            raise ValueError(f"{1 + 1} is 3 < 4")
        else:
            print("é", values.max(-1, keepdims=True)[1:LIMIT])
        total = 0.5
        total += (total * 2  # not - this
                  - 1)
        assert total < 1
        return min(total, 7) if total is not None else "a" + "b"
'''


def whats(kind: str) -> list[str]:
    return [fault.what for fault in faults_in(SOURCE) if fault.kind == kind]


def test_every_kind_of_fault_is_seen_in_the_bodies_of_functions_alone() -> None:
    assert whats("comparison") == ["`>=` to `>`", "`is not` to `is`"]
    assert whats("logic") == ["`and` to `or`"]
    # The minus stands behind a comment.
    assert whats("arithmetic") == ["`+=` to `-=`", "`*` to `/`"]
    assert whats("integer")[:2] == ["`2` to `3`", "`2` to `1`"]
    assert whats("not") == ["`not` dropped"]
    assert whats("arms") == ["arms of `if` exchanged"] * 2
    assert whats("axis") == ["`-1` to `0`"]
    assert whats("bound") == ["`LIMIT` to `LIMIT + 1`"]
    assert whats("flag") == ["`True` to `False`"]
    assert whats("float") == ["`0.5` to `0.55`"]
    assert whats("keyword") == ["`keepdims=True` dropped"]
    assert whats("name") == ["`max` to `min`", "`min` to `max`"]
    left_out = whats("statement")
    assert len(left_out) == 2 and left_out[0].startswith('`print("é", values.max')


def test_a_fault_changes_its_place_and_nothing_else() -> None:
    for fault in faults_in(SOURCE):
        changed = fault.apply(SOURCE)
        compile(changed, fault.what, "exec")
        assert changed != SOURCE and fault.function == "Sizes.largest"
        assert changed.startswith(SOURCE[: SOURCE.index('"""Return')])
    (dropped,) = [fault for fault in faults_in(SOURCE) if fault.kind == "keyword"]
    assert "values.max(-1)[1:LIMIT]" in dropped.apply(SOURCE)


def test_the_seed_decides_what_is_drawn() -> None:
    first, second, other = (
        [mutant.name for mutant in draw(seed, 12, "passes")[0]] for seed in (1, 1, 2)
    )
    assert first == second != other
    assert len(set(first)) == 12
    mutants, _ = draw(3, 10**6, "measures")
    kinds = {mutant.fault.kind for mutant in mutants}
    assert {"comparison", "arithmetic", "axis", "keyword"} <= kinds
    assert all(mutant.is_sound for mutant in mutants)


def test_what_is_put_aside_is_still_there() -> None:
    for file, function, line, mutation in equivalents():
        source = (ROOT / "src" / "hiddenscope" / file).read_text("utf-8")
        names = set()
        for fault in faults_in(source):
            text = source.splitlines()[fault.line - 1].strip()
            names.add((fault.function, text, fault.what))
        assert (function, line, mutation) in names, (file, function, mutation)


def test_tests_are_near_first() -> None:
    tests = held_against(PurePosixPath("src/hiddenscope/measures/separation.py"))
    room, client = "tests/unit/measures", "tests/unit/analyses/test_project.py"
    assert tests[0] == "src/hiddenscope/measures/separation.py"
    assert tests.index(room) < tests.index(client) < tests.index("tests/laws")


def planted(old: str, new: str) -> Mutant:
    """Return the sites' module with a change of the first of some texts."""
    path = PurePosixPath("src/hiddenscope/sites.py")
    source = (ROOT / path).read_text("utf-8")
    start = len(source[: source.index(old)].encode())
    end = start + len(old.encode())
    return Mutant(path, Fault("any", old, "", 1, start, end, new), source)


@pytest.mark.slow
def test_a_planted_fault_is_caught_and_a_harmless_change_survives() -> None:
    check_copy()
    before = (ROOT / "src" / "hiddenscope" / "sites.py").read_bytes()
    caught = hold(planted("return Site(", "return None and Site("), "near")
    assert (caught.verdict, caught.found) == (CAUGHT, True) and "::" in caught.test
    survived = hold(planted('"""', '"""\n'), "near")
    assert (survived.verdict, survived.found) == (SURVIVED, False)
    assert (ROOT / "src" / "hiddenscope" / "sites.py").read_bytes() == before


def test_a_page_counts_what_was_found() -> None:
    (mutant, other), _ = draw(1, 2, "passes")
    outcomes = [
        Outcome(mutant, CAUGHT, "tests/unit/passes/test_edit.py::test_it", 3.0),
        Outcome(other, SURVIVED),
    ]
    page = report.page(outcomes, [], 1)
    assert "Of 2 mutants drawn by seed 1, 1 are found" in page
    assert "| the room's own tests | 1 |" in page and "**SURVIVED**" in page
    assert report.difference(mutant).count("\n+") == 2


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_entropy_is_declared_as_the_right_one(name: str) -> None:
    wrong = wrong_entropy(name)
    assert wrong.__name__ == "entropy"
    assert wrong.__module__ == "labs.mutants.entropy"
