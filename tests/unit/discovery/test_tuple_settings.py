"""The names of states stay right whatever transformers puts into `hidden_states`.

Since 5.18 `config.tie_last_hidden_states = False` leaves the raw last layer in the tuple.
Since 5.23 a number in `output_hidden_states` counts as it does in the whole tuple; from
5.17 to 5.22 it counted blocks from 0.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

import hiddenscope as hs
from hiddenscope.analyses.anatomy.story import story as anatomy_story
from hiddenscope.analyses.compare.story import End, Median
from hiddenscope.analyses.compare.story import story as compare_story
from hiddenscope.app.cells import _names as cell_names
from hiddenscope.discovery import find
from hiddenscope.results.story import report_of
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer

VERSION = Version(transformers.__version__)
untied = pytest.mark.skipif(
    Version("5.18") > VERSION, reason="tie_last_hidden_states came with 5.18"
)
# One of each kind: rotary, learned positions, several streams, two stacks.
FAMILIES = [
    pytest.param("hrm_text", marks=pytest.mark.slow),
    *("llama", "gpt2", "deepseek_v4", "t5"),
]
TEXT = "the cat sat on the mat"


def with_setting(family: str, setting: bool) -> Any:
    """Return a tiny model whose user has set `tie_last_hidden_states`."""
    module: Any = tiny_model(family)
    for config in configurations(module):
        config.tie_last_hidden_states = setting
    return module


def configurations(module: nn.Module) -> list[Any]:
    return [part.config for part in module.modules() if hasattr(part, "config")]


def loaded(family: str, setting: bool) -> hs.Model:
    return hs.load((with_setting(family, setting), tiny_tokenizer()))


@untied
@pytest.mark.parametrize("family", FAMILIES)
def test_a_raw_last_entry_moves_no_name(family: str) -> None:
    tied, raw = with_setting(family, True), with_setting(family, False)
    expected, anatomy = find(tied), find(raw)
    assert anatomy.taps == expected.taps
    for stack, other in zip(anatomy.stacks, expected.stacks, strict=True):
        assert stack.proof.final == other.proof.final
        assert stack.proof.exit == other.proof.exit
        prefix = f"{stack.name}." if len(anatomy.stacks) > 1 else ""
        names = anatomy.reported_names(stack)
        assert names[-1] == f"{prefix}layer.{stack.depth}"
        assert names[:-1] == expected.reported_names(other)[:-1]
        assert expected.reported_names(other)[-1] == f"{prefix}final"
    assert not any(config.tie_last_hidden_states for config in configurations(raw))
    assert all(config.tie_last_hidden_states for config in configurations(tied))


@untied
@pytest.mark.parametrize("setting", [True, False])
def test_states_are_those_of_plain_hooks_in_both_settings(setting: bool) -> None:
    model = loaded("llama", setting)
    outputs = []
    blocks: Any = model.module.get_submodule("model.layers")
    handle = blocks[-1].register_forward_hook(lambda *call: outputs.append(call[2][0]))
    ids = torch.tensor([[20, 21, 22, 23]])
    with torch.no_grad():
        entries = model.module(ids, output_hidden_states=True).hidden_states
        normed = model.module.get_submodule("model.norm")(outputs[0])
    handle.remove()
    states = model.capture(ids)
    assert torch.equal(states["layer.3"], outputs[0])
    assert torch.equal(states["final"], normed)
    # The name of Hugging Face stands for what this module returns.
    assert torch.equal(states["hidden_states[3]"], entries[3][0])
    assert torch.equal(entries[3][0], normed if setting else outputs[0])
    assert torch.equal(model.capture(ids, "hidden_states[-1]").values[0], entries[3][0])


@untied
def test_the_proof_says_what_the_tuple_ends_with() -> None:
    raw = hs.anatomy(loaded("llama", False))
    assert raw.data["entry"].values.tolist()[-2:] == [
        "hidden_states[3]",
        "last_hidden_state",
    ]
    assert raw.data["difference"].values.tolist() == [0] * 5
    assert raw.facts["stacks"][0]["raw_difference"] is None
    report: Any = report_of(raw)
    told = str(list(anatomy_story(report, raw)))
    assert "does not report it" not in told
    assert "last_hidden_state is final, bit for bit" in told
    tied = hs.anatomy(loaded("llama", True))
    assert "the last entry is final" in tied.summary()
    assert "last_hidden_state" not in tied.summary()


@untied
def test_the_encoder_of_two_stacks_is_compared_with_its_own_last_state() -> None:
    data = hs.anatomy(loaded("t5", False)).data
    for stack, entry in (
        ("encoder", "encoder_last_hidden_state"),
        ("decoder", "last_hidden_state"),
    ):
        final = data.sel(site=f"{stack}.final")
        assert final["entry"].item() == entry
        assert final["difference"].item() == 0


@untied
@pytest.mark.parametrize("setting", [True, False])
def test_tuples_that_were_saved_are_read_as_the_model_makes_them(setting: bool) -> None:
    model = loaded("llama", setting)
    ids = model.encode(TEXT).ids[0]
    with torch.no_grad():
        entries = model.module(
            torch.tensor([ids]), output_hidden_states=True
        ).hidden_states
    named = {f"hidden_states[{k}]": entry[0] for k, entry in enumerate(entries)}
    states = hs.States.read(named, tokens=list(ids), source=model.source())
    assert str(states.sites[-1]) == ("final" if setting else "layer.3")
    expected = model.capture(TEXT)
    for site in states.sites:
        assert torch.equal(states[site], expected[site])
    stacked = torch.stack([entry[0] for entry in entries])
    sites = [f"hidden_states[{k}]" for k in range(4)]
    for how in (sites, ",".join(sites)):
        again = hs.States.read(
            stacked, tokens=list(ids), sites=how, source=model.source()
        )
        assert again.sites == states.sites


@untied
@pytest.mark.parametrize("setting", [True, False])
def test_a_drop_at_the_end_is_blamed_on_the_tuple_that_causes_it(setting: bool) -> None:
    result = hs.compare(loaded("llama", setting), TEXT, "the dog sat on the mat")
    end = End(
        before_last=Median(site="layer.2", median=2.0),
        last=Median(site="layer.3", median=3.0),
        final=Median(site="final", median=1.0),
    )
    whole: Any = report_of(result)
    (stack,) = whole.stacks
    report = replace(whole, stacks=[replace(stack, end=end)])
    told = str(list(compare_story(report, result)))
    assert "after the final norm" in told
    assert ("holds only the first and the third" in told) is setting


@untied
@pytest.mark.parametrize("setting", [True, False])
def test_the_workbench_names_the_entry_that_the_model_has(setting: bool) -> None:
    model = loaded("llama", setting)
    names = {}
    for site in ("layer.2", "layer.3", "final"):
        names[site] = cell_names(model, Site.parse(site), 1).get("Hugging Face")
    assert names.pop("layer.2") == "outputs.hidden_states[2][0, 1]"
    entry = names.pop("final" if setting else "layer.3")
    assert entry == "outputs.hidden_states[3][0, 1]"
    assert set(names.values()) == {None}


@untied
@pytest.mark.parametrize("setting", [True, False])
def test_a_port_may_have_the_other_setting(setting: bool) -> None:
    model, port = loaded("llama", setting), with_setting("llama", not setting)

    def program(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        entries = port(ids, output_hidden_states=True).hidden_states
        return {f"hidden_states[{k}]": entry for k, entry in enumerate(entries)}

    for candidate in (port, program):
        facts = hs.drift(model, candidate, [TEXT]).facts
        assert facts["first_site"] is None


def test_a_selection_in_the_configuration_changes_no_state() -> None:
    expected = hs.load((tiny_model("llama"), tiny_tokenizer())).capture(TEXT)
    module: Any = tiny_model("llama")
    module.config.output_hidden_states = [2]
    states = hs.load((module, tiny_tokenizer())).capture(TEXT)
    assert torch.equal(states.values, expected.values)
    assert module.config.output_hidden_states == [2]


@pytest.mark.skipif(
    Version("5.17") > VERSION, reason="selections of entries came with 5.17"
)
def test_what_a_selected_entry_is_depends_on_the_version() -> None:
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    ids = torch.tensor([[20, 21, 22, 23]])
    with torch.no_grad():
        entries = model.module(ids, output_hidden_states=[1]).hidden_states
    (selected,) = (entry for entry in entries if entry is not None)
    site = "layer.1" if Version("5.23") <= VERSION else "layer.2"
    assert torch.equal(selected[0], model.capture(ids)[site])
