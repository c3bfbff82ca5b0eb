"""A series: the numbers of each member are its own, one model is in memory at a time,
and a job that was killed goes on.
"""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.errors import (
    ArgumentError,
    Damaged,
    FileError,
    LoadError,
    TextError,
    UnknownModel,
)
from hiddenscope.series import run
from hiddenscope.series.weight_files import hash_tensors
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.slices import sliced

TEXTS = ["The rest of the cats sat on the mat.", "A rest of the dogs."]
LABELLED = (
    [f"{'the cat' if k % 2 else 'on or of'} number {k}" for k in range(16)],
    [k % 2 for k in range(16)],
)
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "profile": (TEXTS, {"final_norm": "apart"}),
    "lens": (TEXTS, {"target": "next", "k": 3}),
    "probe": (LABELLED, {"sites": "layer.*"}),
    "project": (LABELLED, {"method": "pca"}),
}


def save(module: Any, path: Path, tokenizer: Any = None) -> Path:
    module.save_pretrained(path)
    (tokenizer or tiny_tokenizer()).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A tiny llama, trained for a few steps; the last checkpoint repeats the third."""
    folder = tmp_path_factory.mktemp("checkpoints")
    module: Any = tiny_model("llama")
    tokenizer = tiny_tokenizer()
    ids = tokenizer("The cat sat on the mat. The dog sat on the cat.")["input_ids"]
    batch = torch.tensor([ids])
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    paths = []
    for step in range(9):
        if step % 4 == 0:
            paths.append(save(module, folder / f"step{step}", tokenizer))
        module.train()
        module(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        module.eval()
    paths.append(folder / "step12")
    again: Any = hs.load(paths[2]).module
    # In other shards, and with another header: not the same files.
    again.save_pretrained(paths[3], max_shard_size="60KB")
    tokenizer.save_pretrained(paths[3])
    return paths


def rows(result: hs.Result, member: str) -> dict[str, Any]:
    return {
        str(name): variable.to_numpy()
        for name, variable in result.data.sel(member=member).items()
    }


@pytest.mark.parametrize("word", ASKED)
def test_a_member_has_the_numbers_of_the_analysis_alone(
    word: str, checkpoints: list[Path]
) -> None:
    data, options = ASKED[word]
    result = hs.series(checkpoints[:3], word, data, options=options)
    for path in checkpoints[:3]:
        alone = getattr(hs, word)(path, data, **options).data
        for name, values in rows(result, path.name).items():
            np.testing.assert_array_equal(values, alone[name].to_numpy(), strict=True)
    assert {"site", "member"} == set(result.data[result.facts["measures"][0]].dims)


@pytest.mark.parametrize(
    ("word", "against"),
    sliced(
        [
            ("compare", "first"),
            ("compare", "previous"),
            ("drift", "first"),
            ("drift", "previous"),
        ],
        2,
    ),
)
def test_a_comparison_is_that_of_captured_states(
    word: str, against: str, checkpoints: list[Path]
) -> None:
    result = hs.series(checkpoints[:3], word, TEXTS, against=against)
    models = [hs.load(path) for path in checkpoints[:3]]
    captured: list[Any] = [model.capture(TEXTS, "layer.*,final") for model in models]
    for place, path in enumerate(checkpoints[:3]):
        reference = 0 if against == "first" else max(0, place - 1)
        assert (
            result.facts["members"][place]["compared_with"]
            == checkpoints[reference].name
        )
        if word == "compare":
            alone = hs.compare(captured[place], captured[reference])
        else:
            alone = hs.drift(captured[reference], models[place], TEXTS)
        for name, values in rows(result, path.name).items():
            if name in alone.data:
                expected = alone.data[name].to_numpy()
                np.testing.assert_array_equal(values, expected, strict=True)
        cka = result.data.get("cka_same_depth")
        if cka is not None and "cka" in alone.data:
            diagonal = np.diagonal(alone.data["cka"].to_numpy())
            np.testing.assert_array_equal(cka.sel(member=path.name), diagonal)


@pytest.mark.parametrize("word", ["profile", "compare"])
def test_one_model_twice_gives_equal_rows(word: str, checkpoints: list[Path]) -> None:
    again = hs.Member(checkpoints[0], name="again")
    result = hs.series([checkpoints[0], checkpoints[1], again], word, TEXTS)
    first, last = rows(result, "step0"), rows(result, "again")
    for name, values in first.items():
        np.testing.assert_array_equal(values, last[name])
    (same,) = result.facts["same_weights"]
    assert same["members"] == ["step0", "again"]
    assert same["computed_once"] is True
    assert "step0 and again have the same weights" in result.summary()


def test_the_order_of_members_changes_no_number(checkpoints: list[Path]) -> None:
    forward = hs.series(checkpoints, "profile", TEXTS)
    backward = hs.series(checkpoints[::-1], "profile", TEXTS)
    for path in checkpoints:
        mine, theirs = rows(forward, path.name), rows(backward, path.name)
        for name, values in mine.items():
            np.testing.assert_array_equal(values, theirs[name])


def test_the_same_weights_in_other_files_are_found_and_computed_once(
    checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = run.load

    def spy(source: Any, **options: Any) -> hs.Model:
        loaded.append(Path(source).name)
        return load(source, **options)

    monkeypatch.setattr(run, "load", spy)
    result = hs.series(checkpoints, "lens", TEXTS)
    assert loaded == ["step0", "step4", "step8"]
    (same,) = result.facts["same_weights"]
    assert same["members"] == ["step8", "step12"]
    assert result.facts["members"][3]["same_result_as"] == "step8"


def test_the_same_weights_in_another_dtype_are_not_computed_once(
    checkpoints: list[Path],
) -> None:
    members = [checkpoints[0], hs.Member(checkpoints[0], dtype="bfloat16")]
    result = hs.series(members, "profile", TEXTS)
    (same,) = result.facts["same_weights"]
    assert same["members"] == ["step0", "step0 bfloat16"]
    assert same["computed_once"] is False
    first, second = result.data["norm_median"].to_numpy()
    assert not np.array_equal(first, second)


def test_another_config_or_tokenizer_is_another_member(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    module: Any = hs.load(checkpoints[0]).module
    scaled = save(module, tmp_path / "scaled")
    config = json.loads((scaled / "config.json").read_text())
    config["rms_norm_eps"] = 0.1
    (scaled / "config.json").write_text(json.dumps(config))
    result = hs.series([checkpoints[0], scaled], "profile", TEXTS)
    assert result.facts["same_weights"][0]["computed_once"] is False
    first, second = result.data["norm_median"].to_numpy()
    assert not np.array_equal(first, second)


def test_the_hash_of_weights_sees_one_bit_and_no_header(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    save_file(weights, tmp_path / "one", {"step": "1"})
    save_file(weights, tmp_path / "two", {"step": "1000"})
    assert hash_tensors([tmp_path / "one"]) == hash_tensors([tmp_path / "two"])
    weights["b"][1, 1] = 1e-30
    save_file(weights, tmp_path / "two")
    assert hash_tensors([tmp_path / "one"]) != hash_tensors([tmp_path / "two"])
    renamed = {"a": torch.ones(3), "c": torch.zeros(2, 2)}
    save_file(renamed, tmp_path / "two")
    assert hash_tensors([tmp_path / "one"]) != hash_tensors([tmp_path / "two"])
    content = (tmp_path / "one").read_bytes()
    (tmp_path / "cut").write_bytes(content[:-4])
    with pytest.raises(Damaged, match="ends within"):
        hash_tensors([tmp_path / "cut"])


@pytest.mark.parametrize(
    ("word", "against"),
    sliced([("profile", "first"), ("compare", "first"), ("drift", "previous")], 2),
)
def test_one_model_is_in_memory_at_a_time(
    word: str, against: str, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: list[weakref.ref[nn.Module]] = []
    load = run.load

    def spy(source: Any, **options: Any) -> hs.Model:
        assert [module for module in modules if module() is not None] == []
        model = load(source, **options)
        modules.append(weakref.ref(model.module))
        return model

    monkeypatch.setattr(run, "load", spy)
    hs.series(checkpoints, word, TEXTS, against=against)
    gc.collect()
    assert len(modules) >= 3
    assert all(module() is None for module in modules)


def test_a_module_of_the_caller_is_left_alone() -> None:
    module = tiny_model("gpt2")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    models = [hs.load((module, None)), (module, None)]
    hs.series(models, "profile", [[5, 6, 7]])
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_sizes_of_a_family_lie_on_one_axis(tmp_path: Path) -> None:
    models = [
        hs.Member((tiny_model("gpt2", layers=layers), tiny_tokenizer()), f"{layers}")
        for layers in (2, 3, 4)
    ]
    result = hs.series(models, "profile", TEXTS)
    data = result.data
    assert result.facts["same_depth"] is False
    depths = [0, 0.25, 1 / 3, 0.5, 2 / 3, 0.75, 1, 1]
    np.testing.assert_allclose(data["depth"], depths)
    assert data["site"].to_numpy()[-1] == "final"
    for member in models:
        alone = hs.profile(member.source, TEXTS).data  # type: ignore[arg-type]
        here = data.sel(member=member.name)
        for place, site in enumerate(here["member_site"].to_numpy()):
            value = here["norm_median"].to_numpy()[place]
            if site:
                assert value == alone["norm_median"].sel(site=site).item()
            else:
                assert np.isnan(value)
    result.save(tmp_path / "sizes.html")
    result.save(tmp_path / "sizes.png", view="all")
    assert "2, 3 and 4 layers" in result.summary()


def test_members_of_other_depths_are_compared_by_cka_alone() -> None:
    models = [
        hs.Member((tiny_model("gpt2", layers=layers), tiny_tokenizer()), f"{layers}")
        for layers in (2, 4)
    ]
    result = hs.series(models, "compare", TEXTS)
    other = result.data.sel(member="4")
    assert not np.isfinite(other["relative_median"]).any()
    assert result.facts["measures"] == ["cka_same_depth"]
    alone = hs.compare(*(hs.load(m.source).capture(TEXTS) for m in models[::-1])).data  # type: ignore[arg-type]
    value = other["cka_same_depth"].sel(site="depth 0.5").item()
    assert value == alone["cka"].sel(site="layer.2", source_site="layer.1").item()


def test_revisions_and_places_are_members() -> None:
    models = [
        hs.Member((tiny_model("gpt2", seed=seed), None), f"step{at}", at=at)
        for seed, at in enumerate((1, 10, 100))
    ]
    result = hs.series(models, "profile", [[5, 6, 7]])
    assert result.data["at"].to_numpy().tolist() == [1, 10, 100]
    assert list(result.data["member"].to_numpy()) == ["step1", "step10", "step100"]
    with pytest.raises(LoadError, match="Member 2 of 2.*revision 'step1'"):
        hs.series([models[0], hs.Member("smollm2", revision="step1")], "lens", "A")


def test_a_resumed_job_gives_the_same_result(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "kept"
    for word in sliced(("profile", "compare"), 1):
        whole = hs.series(checkpoints, word, TEXTS, against="previous")
        hs.series(checkpoints[:2], word, TEXTS, against="previous", to=to)
        resumed = hs.series(checkpoints, word, TEXTS, against="previous", to=to)
        assert resumed.equals(whole)
    loaded: list[Any] = []
    monkeypatch.setattr(run, "load", lambda *a, **k: loaded.append(a))
    again = hs.series(checkpoints, "compare", TEXTS, against="previous", to=to)
    assert again.equals(whole)
    assert loaded == []
    kept = next(to.glob("step4-*.nc"))
    assert hs.Result.load(kept).kind in ("profile", "compare")


@pytest.mark.parametrize(
    "change",
    sliced(
        [
            lambda paths, to: hs.series(paths, "profile", [*TEXTS, "More."], to=to),
            lambda paths, to: hs.series(paths, "lens", TEXTS, to=to),
            lambda paths, to: hs.series(
                paths, "profile", TEXTS, options={"sample": 100}, to=to
            ),
        ],
        1,
    ),
)
def test_a_changed_question_is_computed(
    change: Callable[[list[Path], Path], hs.Result],
    checkpoints: list[Path],
    tmp_path: Path,
) -> None:
    hs.series(checkpoints[:2], "profile", TEXTS, to=tmp_path)
    assert len(list(tmp_path.glob("*.nc"))) == 2
    change(checkpoints[:2], tmp_path)
    assert len(list(tmp_path.glob("*.nc"))) == 4


def test_a_changed_model_is_computed(checkpoints: list[Path], tmp_path: Path) -> None:
    module: Any = hs.load(checkpoints[0]).module
    folder, to = save(module, tmp_path / "model"), tmp_path / "kept"
    before = hs.series([folder, checkpoints[1]], "profile", TEXTS, to=to)
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    save(module, folder)
    after = hs.series([folder, checkpoints[1]], "profile", TEXTS, to=to)
    assert after.equals(hs.series([folder, checkpoints[1]], "profile", TEXTS))
    assert not after.equals(before)


def test_a_damaged_result_is_computed_again(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    whole = hs.series(checkpoints[:2], "profile", TEXTS, to=tmp_path)
    for path in [*tmp_path.glob("step0*.nc"), *tmp_path.glob("step4*.json")]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert hs.series(checkpoints[:2], "profile", TEXTS, to=tmp_path).equals(whole)


KILLED = """
import sys
import hiddenscope as hs
hs.series(sys.argv[2:], "profile", ["The cats sat on the mat."], to=sys.argv[1])
"""


def test_a_job_that_is_killed_loses_one_member_at_most(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    """Kill a real process with signal 9 as soon as some members are kept."""
    texts = ["The cats sat on the mat."]
    members = [str(path) for path in checkpoints[:3]]
    whole = hs.series(members, "profile", texts)
    for wanted in sliced((1, 2), 1):
        to = tmp_path / f"kept{wanted}"
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(to), *members])
        try:
            while len(list(to.glob("*.member.json"))) < wanted:
                assert process.poll() is None or process.returncode == 0
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


def test_a_member_that_cannot_be_loaded_is_named(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(UnknownModel, match=r"Member 2 of 2, nowhere: No model at"):
        hs.series([checkpoints[0], missing], "profile", TEXTS)
    to = tmp_path / "kept"
    broken: Any = tiny_model("llama")
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    folder = save(broken, tmp_path / "broken")
    with pytest.raises(ArithmeticError, match="Member 3 of 3, broken") as raised:
        hs.series([*checkpoints[:2], folder], "profile", TEXTS, to=to)
    assert f"The results of the members before it are in {to}" in str(raised.value)
    assert len(list(to.glob("*.member.json"))) == 2


def test_members_that_make_other_tokens_are_refused_or_told(tmp_path: Path) -> None:
    models = [
        hs.Member((tiny_model("llama"), tiny_tokenizer()), "with"),
        hs.Member((tiny_model("llama", seed=1), tiny_tokenizer(bos=False)), "without"),
    ]
    for word in ("compare", "drift"):
        with pytest.raises(TextError, match="Member 2 of 2, without.*token by token"):
            hs.series(models, word, TEXTS)
    for word in ("profile", "lens"):
        result = hs.series(models, word, TEXTS)
        assert result.facts["same_tokens"] is False
        assert "make different tokens of the texts" in result.summary()


@pytest.mark.parametrize(
    ("models", "word", "data", "options", "message"),
    [
        ([], "profile", TEXTS, {}, "the list is empty"),
        (["smollm2"], "profile", TEXTS, {}, "it has one member"),
        ("smollm2", "profile", TEXTS, {}, "must be a list"),
        (["a", 5], "profile", TEXTS, {}, "member 2 is 5, which is not a model"),
        (["a", ("b", "step1")], "profile", TEXTS, {}, "hs.Member"),
        (["a", "b"], "patch", TEXTS, {}, "a series runs profile, compare, lens"),
        (["a", "b"], "profile", None, {}, "there are no texts"),
        (["a", "b"], "profile", [], {}, "the list of texts is empty"),
        (["a", "b"], "probe", None, {}, "no labelled texts"),
        (["a", "b"], "probe", {"x": LABELLED}, {}, "several datasets"),
        (["a", "b"], "lens", TEXTS, {"lens": "x"}, "it has sites, k, target, targets"),
        (["a", "b"], "drift", TEXTS, {"baseline": "x"}, "No option 'baseline'"),
        (["a", "b"], "lens", TEXTS, {"k": object()}, "cannot be written down"),
    ],
)
def test_bad_questions_are_refused_before_anything_is_loaded(
    models: Any, word: str, data: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ArgumentError, TextError), match=message):
        hs.series(models, word, data, options=options)


def test_other_bad_input_is_refused(tmp_path: Path) -> None:
    models = [(tiny_model("gpt2"), None)] * 2
    with pytest.raises(ArgumentError, match="'first' or with the 'previous'"):
        hs.series(models, "compare", TEXTS, against="last")
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(FileError, match="Cannot keep results in"):
        hs.series(models, "profile", [[5, 6]], to=path)
    with pytest.raises(ArgumentError, match="loaded already"):
        hs.Member(hs.load(models[0]), dtype="bfloat16")
    with pytest.raises(ArgumentError, match="no place on an axis"):
        hs.Member("smollm2", at=float("nan"))


def test_texts_that_can_be_read_once_serve_every_member() -> None:
    models = [(tiny_model("gpt2", seed=seed), tiny_tokenizer()) for seed in (0, 1)]
    listed = hs.series(models, "profile", TEXTS)
    assert hs.series(models, "profile", iter(TEXTS)).equals(listed)


def test_an_encoder_decoder_is_a_member() -> None:
    models = []
    for seed in (0, 1):
        module: Any = tiny_model("t5", seed=seed)
        module.config.decoder_start_token_id = 0
        models.append((module, tiny_tokenizer()))
    for word in ("profile", "compare"):
        result = hs.series(models, word, TEXTS, options={"targets": TEXTS})
        assert "encoder.layer.1" in result.data["site"].to_numpy()
        assert "decoder.final" in result.data["site"].to_numpy()


def test_strengths_of_an_adapter_are_members(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
    base: Any = hs.load(checkpoints[0], device="cpu").module
    adapted = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1, generator=generator)
    adapted.peft_config["default"].base_model_name_or_path = str(checkpoints[0])
    adapter = tmp_path / "lora"
    adapted.save_pretrained(adapter)
    strengths = (0.0, 0.5, 1.0)
    members: list[Any] = [
        hs.Adapted(checkpoints[0], adapter, strength=strength) for strength in strengths
    ]
    result = hs.series([checkpoints[0], *members, adapter], "compare", TEXTS)
    median = result.data["relative_median"].sel(site="layer.3").to_numpy()
    assert median[0] == 0
    assert median[1] == 0, "at strength 0 an adapter does nothing"
    assert 0 < median[2] < median[3]
    (same,) = result.facts["same_weights"]
    assert same["members"] == ["step0 + lora", "lora"], "strengths are told apart"
    assert same["computed_once"] is True


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_quantised_weights_are_members(scheme: str, checkpoints: list[Path]) -> None:
    quantised = hs.Quantised(checkpoints[0], scheme)
    pytest.importorskip("torchao" if scheme == "int8" else "bitsandbytes")
    result = hs.series([checkpoints[0], quantised], "drift", TEXTS)
    assert result.facts["same_weights"] == []
    error = result.data["total_error"].sel(site="layer.3").to_numpy()
    assert error[1] > 10 * error[0]


def test_copies_have_no_line_of_their_own(checkpoints: list[Path]) -> None:
    from hiddenscope.views import Lines, views_of

    result = hs.series(checkpoints, "profile", TEXTS)
    along_depth, along_members = views_of(result)[:2]
    assert isinstance(along_depth, Lines)
    assert isinstance(along_members, Lines)
    assert [line.name for line in along_depth.series] == ["step0", "step4", "step8"]
    assert along_members.x == ("step0", "step4", "step8", "step12")


def test_revisions_of_the_hub_that_repeat_their_weights_are_found(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in EleutherAI/pythia, issue 205: two step branches, one checkpoint."""
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    home = tmp_path / "models--org--tiny"
    (home / "refs").mkdir(parents=True)
    branches = {"step1000": 0, "step2000": 1, "step3000": 1}
    for number, (branch, place) in enumerate(branches.items()):
        commit = f"{number:040x}"
        shutil.copytree(checkpoints[place], home / "snapshots" / commit)
        (home / "refs" / branch).write_text(commit)
    members = [hs.Member("org/tiny", revision=branch) for branch in branches]
    result = hs.series(members, "profile", TEXTS)
    assert list(result.data["member"].to_numpy()) == [
        "tiny step1000",
        "tiny step2000",
        "tiny step3000",
    ]
    (same,) = result.facts["same_weights"]
    assert same["members"] == ["tiny step2000", "tiny step3000"]
    assert same["computed_once"] is True
    assert result.source["model"] == "org/tiny"
    assert result.facts["members"][1]["revision"] == f"{1:040x}"
    missing = hs.Member("org/tiny", revision="step9000")
    with pytest.raises(LoadError, match="Member 2 of 2, tiny step9000"):
        hs.series([members[0], missing], "profile", TEXTS)


def test_live_members_with_one_set_of_weights_may_differ() -> None:
    """By how an adapter is scaled, whether it is on, and hooks of somebody else."""

    def adapted(alpha: int) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=2, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(tiny_model("llama"), config).eval()

    switched_off, hooked = adapted(8), adapted(8)
    switched_off.base_model.disable_adapter_layers()
    block = hooked.base_model.model.model.layers[0]
    block.register_forward_hook(lambda module, args, output: output * 2)
    modules = [adapted(8), adapted(64), switched_off, hooked]
    result = hs.series([(module, None) for module in modules], "profile", [[5, 6, 7]])
    norms = result.data["norm_median"].to_numpy()
    alone = [hs.profile((module, None), [[5, 6, 7]]) for module in modules]
    for row, expected in zip(norms, alone, strict=True):
        values = expected.data["norm_median"].to_numpy()
        np.testing.assert_array_equal(np.sort(row[~np.isnan(row)]), np.sort(values))


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_kept(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(checkpoints[0], folder)
    load = run.load

    def replacing(source: Any, **options: Any) -> hs.Model:
        if Path(source) == folder:
            weights = checkpoints[1] / "model.safetensors"
            shutil.copy(weights, folder / "model.safetensors")
        return load(source, **options)

    monkeypatch.setattr(run, "load", replacing)
    with pytest.raises(Damaged, match="changed while the series ran"):
        hs.series([folder, checkpoints[1]], "profile", TEXTS, to=tmp_path / "kept")
