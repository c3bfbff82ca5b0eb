"""Laws of results: what is kept, what is said, and what may not be said."""

import re
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np

import hiddenscope as hs
from hiddenscope.results.export import to_plain
from hiddenscope.results.story import report_of
from hiddenscope.testing.checks.law import (
    hold,
    law,
    only_if,
    result_of,
)
from hiddenscope.testing.comparing import flat_facts
from hiddenscope.testing.entries import Entry
from hiddenscope.testing.subjects import Subject


@law()
def check_json_and_netcdf_give_it_back(entry: Entry, subject: Subject) -> None:
    """A result that is saved and loaded is equal: numbers, dtypes, facts, words."""
    result = result_of(entry, subject)
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".json", ".nc"):
            path = Path(folder) / f"result{suffix}"
            result.save(path)
            loaded = hs.Result.load(path)
            hold(loaded.equals(result), f"{suffix} gives another result back")
            hold(loaded.summary() == result.summary(), f"{suffix} says something else")


@law()
def check_csv_has_every_number(entry: Entry, subject: Subject) -> None:
    """A table has a row for each number of the first variable, and its values."""
    import pandas

    result = result_of(entry, subject)
    only_if(len(result.data.data_vars), "it has no variables")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.csv"
        result.save(path)
        table = pandas.read_csv(path)
    name = next(iter(result))
    variable = result.data[name]
    hold(name in "".join(table.columns) or (table == name).any().any(), f"no {name}")
    hold(len(table) >= variable.size, f"{len(table)} rows for {variable.size} numbers")


@law()
def check_the_facts_are_the_report(entry: Entry, subject: Subject) -> None:
    """Facts are read into the report, and the report gives the facts."""
    result = result_of(entry, subject)
    hold(to_plain(report_of(result), "facts") == result.facts, "the report has others")


@law()
def check_facts_are_numbers(entry: Entry, subject: Subject) -> None:
    """No fact is infinite, and an interval holds its number."""
    result = result_of(entry, subject)
    for path, value in flat_facts(result.facts):
        if isinstance(value, float):
            hold(not np.isinf(value), f"facts.{path} is {value}")
    data = result.data
    for name in data.data_vars:
        low, high = f"{name}_low", f"{name}_high"
        if not {low, high} <= set(data.data_vars) or data[low].dims != data[name].dims:
            continue
        for first, second in pairwise((data[low], data[name], data[high])):
            wrong = first.to_numpy() > second.to_numpy() + 1e-6
            hold(not wrong.any(), f"{name} is outside of its interval")


@law()
def check_every_variable_is_named(entry: Entry, subject: Subject) -> None:
    """Every number says what it is, along dimensions that have names."""
    result = result_of(entry, subject)
    for name, variable in result.data.data_vars.items():
        if variable.dtype.kind == "f":
            hold(variable.attrs.get("long_name"), f"{name} does not say what it is")
        for dim in map(str, variable.dims):
            hold(re.fullmatch(r"[a-z][a-z_]*", dim), f"{dim} is no word")


@law()
def check_the_page_can_be_made(entry: Entry, subject: Subject) -> None:
    """The page of a result is written."""
    _hold_saved(result_of(entry, subject), ".html")


@law(slow=True)
def check_the_figure_can_be_drawn(entry: Entry, subject: Subject) -> None:
    """The main picture is drawn for print."""
    result = result_of(entry, subject)
    only_if(result.views, "it has no pictures")
    _hold_saved(result, ".png")


def _hold_saved(result: hs.Result, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"result{suffix}"
        result.save(path)
        hold(path.stat().st_size > 500, f"{suffix} is empty")


@law()
def check_numbers_carry_no_gradient(entry: Entry, subject: Subject) -> None:
    """What is given is data: no variable holds an object that keeps a graph alive."""
    result = result_of(entry, subject)
    for name, variable in result.data.variables.items():
        if variable.dtype.kind == "O":
            kinds = {type(value) for value in variable.to_numpy().ravel()}
            hold(kinds <= {str}, f"{name} holds {kinds}")
