"""A series: the numbers of each member are its own, one model is in memory at a time,
and what was computed is not computed again.
"""

import gc
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file
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
from hiddenscope.series import job
from hiddenscope.series.identity import hash_tensors
from hiddenscope.series.question import question_of
from hiddenscope.testing import tiny_model, tiny_tokenizer

TEXTS = ["The rest of the cats sat on the mat.", "A rest of the dogs."]
LABELLED = (
    [f"{'the cat' if k % 2 else 'on or of'} number {k}" for k in range(16)],
    [k % 2 for k in range(16)],
)


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> Iterator[None]:
    """Leave all that is imported out of the collections that free each member."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def save(module: Any, path: Path) -> Path:
    module.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A tiny llama, trained for a few steps; the last checkpoint repeats the third."""
    folder = tmp_path_factory.mktemp("checkpoints")
    module: Any = tiny_model("llama", layers=2)
    ids = tiny_tokenizer()("The cat sat on the mat. The dog sat on the cat.")
    batch = torch.tensor([ids["input_ids"]])
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    paths = []
    for step in range(9):
        if step % 4 == 0:
            paths.append(save(module, folder / f"step{step}"))
        module.train()
        module(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        module.eval()
    again: Any = hs.load(paths[2]).module
    paths.append(save(again, folder / "step12"))
    # In other shards, and with another header: not the same files.
    (paths[3] / "model.safetensors").unlink()
    again.save_pretrained(paths[3], max_shard_size="60KB")
    return paths


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the members that are loaded, and hold that no other is in memory then."""
    names: list[str] = []
    modules: list[weakref.ref[nn.Module]] = []
    load = job.load

    def spy(source: Any, **options: Any) -> hs.Model:
        assert [module for module in modules if module() is not None] == []
        model = load(source, **options)
        modules.append(weakref.ref(model.module))
        names.append(Path(source).name)
        return model

    monkeypatch.setattr(job, "load", spy)
    return names


def tiny_members(count: int = 2, family: str = "gpt2") -> list[Any]:
    """Modules with a tokenizer, of several seeds."""
    members = []
    for seed in range(count):
        module: Any = tiny_model(family, seed=seed, layers=2)
        if family == "t5":
            module.config.decoder_start_token_id = 0
        members.append((module, tiny_tokenizer()))
    return members


def depths(*layers: int) -> list[hs.Member]:
    """Models of one family with so many layers, which is their name."""
    return [
        hs.Member((tiny_model("gpt2", layers=count), tiny_tokenizer()), f"{count}")
        for count in layers
    ]


def rows(result: hs.Result, member: str) -> dict[str, Any]:
    variables = result.data.sel(member=member).items()
    return {str(name): variable.to_numpy() for name, variable in variables}


def check_headline(result: hs.Result, place: str) -> None:
    """Hold the main number of each member against the data."""
    (headline,) = result.facts["headlines"]
    assert headline["place"] == place
    values = result.data[headline["measure"]]
    for value in headline["values"]:
        here = values.sel(member=value["member"])
        assert value["value"] == here.sel(site=value["site"]).item()
        if place == "best":
            assert value["value"] == here.max().item()
        else:
            assert value["site"] == {"middle": "layer.1", "last": "layer.2"}[place]


@pytest.mark.parametrize("against", ["first", "previous"])
@pytest.mark.parametrize("word", ["compare", "drift"])
def test_a_comparison_is_that_of_captured_states(
    word: str, against: str, checkpoints: list[Path], loaded: list[str]
) -> None:
    result = hs.series(checkpoints[:3], word, TEXTS, against=against)
    assert loaded == ["step0", "step4", "step8"]
    check_headline(result, "last")
    models = [hs.load(path) for path in checkpoints[:3]]
    captured: list[Any] = [model.capture(TEXTS, "layer.*,final") for model in models]
    for place, path in enumerate(checkpoints[:3]):
        reference = 0 if against == "first" else max(0, place - 1)
        compared_with = result.facts["members"][place]["compared_with"]
        assert compared_with == checkpoints[reference].name
        if word == "compare":
            alone = hs.compare(captured[place], captured[reference]).data
        else:
            alone = hs.drift(captured[reference], models[place], TEXTS).data
        for name, values in rows(result, path.name).items():
            if name in alone:
                expected = alone[name].to_numpy()
                np.testing.assert_array_equal(values, expected, strict=True)


def test_the_same_weights_in_other_files_are_found_and_computed_once(
    checkpoints: list[Path], loaded: list[str]
) -> None:
    forward = hs.series(checkpoints, "profile", TEXTS)
    assert loaded == ["step0", "step4", "step8"]
    (same,) = forward.facts["same_weights"]
    assert same["members"] == ["step8", "step12"] and same["computed_once"] is True
    assert forward.facts["members"][3]["same_result_as"] == "step8"
    backward = hs.series(checkpoints[::-1], "profile", TEXTS)
    for path in checkpoints:
        theirs = rows(backward, path.name)
        for name, values in rows(forward, path.name).items():
            np.testing.assert_array_equal(values, theirs[name])


def test_the_same_weights_in_another_dtype_or_config_are_not_computed_once(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    scaled = tmp_path / "scaled"
    shutil.copytree(checkpoints[0], scaled)
    config = json.loads((scaled / "config.json").read_text())
    (scaled / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    narrow = hs.Member(checkpoints[0], dtype="bfloat16")
    result = hs.series([checkpoints[0], narrow, scaled], "profile", TEXTS)
    (same,) = result.facts["same_weights"]
    assert same["members"] == ["step0", "step0 bfloat16", "scaled"]
    assert same["computed_once"] is False
    norms = result.data["norm_median"].to_numpy()
    assert len({row.tobytes() for row in norms}) == 3


def test_the_hash_of_weights_sees_one_bit_and_no_header(tmp_path: Path) -> None:
    one, two, cut = (tmp_path / name for name in ("one", "two", "cut"))
    weights = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    save_file(weights, one, {"step": "1"})
    save_file(weights, two, {"step": "1000"})
    assert hash_tensors([one]) == hash_tensors([two])
    weights["b"][1, 1] = 1e-30
    save_file(weights, two)
    assert hash_tensors([one]) != hash_tensors([two])
    save_file({"a": torch.ones(3), "c": torch.zeros(2, 2)}, two)
    assert hash_tensors([one]) != hash_tensors([two])
    cut.write_bytes(one.read_bytes()[:-4])
    with pytest.raises(Damaged, match="cut short"):
        hash_tensors([cut])


def test_a_module_of_the_caller_is_left_alone() -> None:
    module = tiny_model("gpt2")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    hs.series([hs.load((module, None)), (module, None)], "profile", [[5, 6, 7]])
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_sizes_of_a_family_lie_on_one_axis() -> None:
    models = depths(2, 3, 4)
    result = hs.series(models, "profile", TEXTS)
    data = result.data
    assert result.facts["same_depth"] is False
    places = [0, 0.25, 1 / 3, 0.5, 2 / 3, 0.75, 1, 1]
    np.testing.assert_allclose(data["depth"], places)
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


def test_members_of_other_depths_are_compared_by_cka_alone() -> None:
    models = depths(2, 4)
    result = hs.series(models, "compare", TEXTS)
    other = result.data.sel(member="4")
    assert not np.isfinite(other["relative_median"]).any()
    assert result.facts["measures"] == ["cka_same_depth"]
    four, two = (hs.load(member.source).capture(TEXTS) for member in models[::-1])  # type: ignore[arg-type]
    cka = hs.compare(four, two).data["cka"].sel(site="layer.2", source_site="layer.1")
    assert other["cka_same_depth"].sel(site="depth 0.5").item() == cka.item()


def test_members_have_names_and_places() -> None:
    models = [
        hs.Member(model, f"step{at}", at=at)
        for model, at in zip(tiny_members(3), (1, 10, 100), strict=True)
    ]
    result = hs.series(models, "profile", [[5, 6, 7]])
    assert result.data["at"].to_numpy().tolist() == [1, 10, 100]
    assert list(result.data["member"].to_numpy()) == ["step1", "step10", "step100"]
    with pytest.raises(LoadError, match="Member 2 of 2.*revision 'step1'"):
        hs.series([models[0], hs.Member("smollm2", revision="step1")], "lens", "A")


def test_a_resumed_job_gives_the_same_result(
    checkpoints: list[Path], tmp_path: Path, loaded: list[str]
) -> None:
    def ask(paths: list[Path], to: Path | None = tmp_path) -> hs.Result:
        return hs.series(paths, "compare", TEXTS, against="previous", to=to)

    whole = ask(checkpoints[:3], None)
    ask(checkpoints[:2])
    loaded.clear()
    assert ask(checkpoints[:3]).equals(whole)
    # The new member, and the one it is compared with.
    assert loaded == ["step4", "step8"]
    loaded.clear()
    assert ask(checkpoints[:3]).equals(whole)
    assert loaded == []
    assert hs.Result.load(next(tmp_path.glob("step4-*.nc"))).kind == "compare"


def test_a_changed_question_is_computed(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    for number, texts in enumerate((TEXTS, [*TEXTS, "More."]), 1):
        hs.series(checkpoints[:2], "lens", texts, to=tmp_path)
        assert len(list(tmp_path.glob("*.nc"))) == 2 * number
    texts, labels = LABELLED
    asked: list[tuple[str, Any, dict[str, Any], str]] = [
        ("profile", TEXTS, {}, "first"),
        ("profile", TEXTS[:1], {}, "first"),
        ("lens", TEXTS, {}, "first"),
        ("profile", TEXTS, {"sample": 100}, "first"),
        ("compare", TEXTS, {}, "first"),
        ("compare", TEXTS, {}, "previous"),
        ("probe", LABELLED, {}, "first"),
        ("probe", (texts, labels[::-1]), {}, "first"),
        ("probe", hs.read(LABELLED, group=labels), {}, "first"),
    ]
    keys = [question_of(*question).key for question in asked]
    assert len(set(keys)) == len(asked)
    # Only a comparison depends on what is compared with.
    assert question_of("profile", TEXTS, {}, "previous").key == keys[0]


def test_a_changed_model_is_computed(checkpoints: list[Path], tmp_path: Path) -> None:
    folder, to = tmp_path / "model", tmp_path / "kept"
    module: Any = hs.load(checkpoints[0]).module
    members = [save(module, folder), checkpoints[1]]
    before = hs.series(members, "lens", TEXTS, to=to)
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    save(module, folder)
    after = hs.series(members, "lens", TEXTS, to=to)
    assert after.equals(hs.series(members, "lens", TEXTS))
    assert not after.equals(before)


def test_a_damaged_result_is_computed_again(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    whole = hs.series(checkpoints[:2], "lens", TEXTS, to=tmp_path)
    for path in [*tmp_path.glob("step0*.nc"), *tmp_path.glob("step4*.json")]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert hs.series(checkpoints[:2], "lens", TEXTS, to=tmp_path).equals(whole)


def test_a_member_that_cannot_be_loaded_is_named(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    missing, to = tmp_path / "nowhere", tmp_path / "kept"
    with pytest.raises(UnknownModel, match=r"Member 2 of 2, nowhere: No model at"):
        hs.series([checkpoints[0], missing], "profile", TEXTS)
    broken: Any = tiny_model("llama")
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    folder = save(broken, tmp_path / "broken")
    with pytest.raises(ArithmeticError, match="Member 3 of 3, broken") as raised:
        hs.series([*checkpoints[:2], folder], "lens", TEXTS, to=to)
    assert f"The results of the members before it are in {to}" in str(raised.value)
    assert len(list(to.glob("*.member.json"))) == 2


def test_members_that_make_other_tokens_are_refused_or_told() -> None:
    module = tiny_model("llama", layers=1)
    models = [
        hs.Member((module, tiny_tokenizer()), "with"),
        hs.Member((module, tiny_tokenizer(bos=False)), "without"),
    ]
    for word in ("compare", "drift"):
        with pytest.raises(TextError, match="Member 2 of 2, without.*token by token"):
            hs.series(models, word, TEXTS)
    result = hs.series(models, "profile", TEXTS)
    assert result.facts["same_tokens"] is False


REFUSED: list[tuple[Any, str, Any, dict[str, Any], str]] = [
    ([], "profile", TEXTS, {}, "the list is empty"),
    (["smollm2"], "profile", TEXTS, {}, "it has one member"),
    ("smollm2", "profile", TEXTS, {}, "must be a list"),
    (["a", 5], "profile", TEXTS, {}, "member 2 is 5, which is not a model"),
    (["a", ("b", "step1")], "profile", TEXTS, {}, "hs.Member"),
    (["a", "b"], "patch", TEXTS, {}, "a series runs profile, compare, lens"),
    (["a", "b"], "profile", None, {}, "there are no texts"),
    (["a", "b"], "profile", [], {}, "the list of texts is empty"),
    (["a", "b"], "profile", 5, {}, "got int, and every member"),
    (["a", "b"], "profile", b"a", {}, "got bytes, and every member"),
    (["a", "b"], "profile", range(10**12), {}, "a range has more than"),
    (["a", "b"], "probe", None, {}, "no labelled texts"),
    (["a", "b"], "probe", {"x": LABELLED}, {}, "several datasets"),
    (["a", "b"], "lens", TEXTS, {"lens": "x"}, "it has sites, k, target, targets"),
    (["a", "b"], "drift", TEXTS, {"baseline": "x"}, "No option 'baseline'"),
    (["a", "b"], "lens", TEXTS, {"k": object()}, "cannot be written down"),
]


def test_bad_questions_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for models, word, data, options, message in REFUSED:
        with pytest.raises((ArgumentError, TextError), match=message):
            hs.series(models, word, data, options=options)
    models = tiny_members()
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
    models = tiny_members()
    listed = hs.series(models, "profile", TEXTS)
    assert hs.series(models, "profile", iter(TEXTS)).equals(listed)


@pytest.mark.parametrize("word", ["profile", "compare"])
def test_an_encoder_decoder_is_a_member(word: str) -> None:
    models = tiny_members(family="t5")
    result = hs.series(models, word, TEXTS, options={"targets": TEXTS})
    sites = result.data["site"].to_numpy().tolist()
    assert "encoder.layer.1" in sites and "decoder.final" in sites


def test_strengths_of_an_adapter_are_members(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
    base: Any = hs.load(checkpoints[0], device="cpu").module
    adapted = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    adapted.peft_config["default"].base_model_name_or_path = str(checkpoints[0])
    adapter = tmp_path / "lora"
    adapted.save_pretrained(adapter)
    members: list[Any] = [
        hs.Adapted(checkpoints[0], adapter, strength=strength)
        for strength in (0.0, 0.5, 1.0)
    ]
    result = hs.series([checkpoints[0], *members, adapter], "compare", TEXTS)
    median = result.data["relative_median"].sel(site="layer.2").to_numpy()
    assert median[0] == 0
    assert median[1] == 0, "at strength 0 an adapter does nothing"
    assert 0 < median[2] < median[3]
    (same,) = result.facts["same_weights"]
    assert same["members"] == ["step0 + lora", "lora"], "strengths are told apart"
    assert same["computed_once"] is True


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_quantised_weights_are_members(scheme: str, checkpoints: list[Path]) -> None:
    pytest.importorskip("torchao" if scheme == "int8" else "bitsandbytes")
    quantised = hs.Quantised(checkpoints[0], scheme)
    result = hs.series([checkpoints[0], quantised], "drift", TEXTS)
    assert result.facts["same_weights"] == []
    error = result.data["total_error"].sel(site="layer.2").to_numpy()
    assert error[1] > 10 * error[0]


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
    names = result.data["member"].to_numpy().tolist()
    assert names == [f"tiny {branch}" for branch in branches]
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
        return peft.get_peft_model(tiny_model("llama", layers=1), config).eval()

    switched_off, hooked = adapted(8), adapted(8)
    switched_off.base_model.disable_adapter_layers()
    block = hooked.base_model.model.model.layers[0]
    block.register_forward_hook(lambda module, args, output: output * 2)
    models = [(one, None) for one in (adapted(8), adapted(64), switched_off, hooked)]
    norms = hs.series(models, "profile", [[5, 6, 7]]).data["norm_median"].to_numpy()
    for row, model in zip(norms, models, strict=True):
        values = hs.profile(model, [[5, 6, 7]]).data["norm_median"].to_numpy()
        np.testing.assert_array_equal(np.sort(row[~np.isnan(row)]), np.sort(values))


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_kept(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, load = tmp_path / "mine", job.load
    shutil.copytree(checkpoints[0], folder)

    def replacing(source: Any, **options: Any) -> hs.Model:
        shutil.copy(checkpoints[1] / "model.safetensors", folder)
        return load(source, **options)

    monkeypatch.setattr(job, "load", replacing)
    with pytest.raises(Damaged, match="changed while the series ran"):
        hs.series([folder, checkpoints[1]], "profile", TEXTS, to=tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []
