"""The module as other people's programs leave it: watched rightly, or refused with the
reason.

tests/slow/real has quantised modules.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import accelerate.hooks
import pytest
import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.errors import ModuleError, TooLarge
from hiddenscope.model.batching import states_disagreement
from hiddenscope.modules import hooks
from hiddenscope.modules.calls import depends_on_mode
from hiddenscope.testing import tiny_model

Hanging = Callable[[nn.Module], dict[str, Any]]
TEXT = [7, 99, 23, 64, 31, 8]
TEXTS = [TEXT, TEXT[:2], [50, 51, 52]]


@cache
def plain(family: str = "llama") -> Any:
    return hs.load((tiny_model(family), None)).capture(TEXTS)


def _dropped(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.5, module.training)


class _Reads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if self.training else x


class _Calls(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _dropped(self, x)


class _Inherits(_Reads):
    pass


class _DropsMore(nn.Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.training)


def _overridden() -> nn.Module:
    module = nn.Identity()
    module.forward = _Reads().forward  # type: ignore[method-assign]
    return module


def test_what_computes_something_else_in_train_mode_is_known_by_its_code() -> None:
    for module in (
        *(_Reads(), _Calls(), _Inherits(), _overridden()),
        *(nn.Dropout(), nn.BatchNorm1d(64), nn.RReLU(), _DropsMore(0.0)),
        nn.MultiheadAttention(64, 4, dropout=0.1),
        nn.LSTM(64, 64, 2, dropout=0.1),
        nn.InstanceNorm1d(4, track_running_stats=True),
    ):
        assert depends_on_mode(module), module
    for module in (
        *(nn.GELU(), nn.Identity(), nn.SiLU(), nn.Linear(4, 4)),
        *(nn.LayerNorm(4), nn.RMSNorm(4), nn.Embedding(4, 4), nn.Dropout(0.0)),
        *(nn.ModuleList(), nn.MultiheadAttention(64, 4), nn.LSTM(64, 64)),
        *(nn.InstanceNorm1d(4), nn.Sequential(nn.GELU(), nn.Dropout())),
        nn.TransformerEncoderLayer(64, 4, dropout=0.0),
    ):
        assert not depends_on_mode(module), module


def test_a_part_in_train_mode_counts_if_it_computes_something_else() -> None:
    module: Any = tiny_model("llama")
    mlp = module.model.layers[1].mlp
    mlp.extra = nn.Sequential(nn.GELU(), nn.TransformerEncoderLayer(8, 2, dropout=0.0))
    model = hs.load((module, None))
    assert mlp.extra.training
    assert not hs.drift(tiny_model("llama"), module, TEXTS).facts["drifted"]
    mlp.extra = nn.Sequential(nn.GELU(), nn.Dropout())
    said = r"train\(\) mode at model.layers.1.mlp.extra"
    for ask in (
        lambda: hs.load((module, None)),
        lambda: hs.drift(tiny_model("llama"), module, TEXTS),
        lambda: model.capture([TEXT]),
        lambda: hs.record(model, [TEXT]),
        lambda: model.capture_generation([TEXT]),
    ):
        with pytest.raises(ModuleError, match=said):
            ask()
    module.eval()
    assert torch.equal(model.capture(TEXTS).values, plain().values)  # type: ignore[union-attr]
    for part in ("model.layers.1.self_attn", ""):
        module.get_submodule(part).train()
        where = f" at {part}" if part else ""
        said = rf"train\(\) mode{where}.*module.eval\(\)"
        for ask in (lambda: hs.load((module, None)), lambda: model.capture([TEXT])):
            with pytest.raises(ModuleError, match=said):
                ask()
        assert module.get_submodule(part).training


def test_a_loop_may_train_and_keep_checkpoints_while_it_is_recorded() -> None:
    module: Any = tiny_model("llama").train()
    with hs.recording(module, "layer.1") as rec:
        module(torch.tensor([TEXT])).logits.sum().backward()
    assert rec.states.values.shape == (1, 6, 64)
    assert module.lm_head.weight.grad is not None
    # transformers 5.23 renames it.
    name = "activation_checkpointing_enable"
    if not hasattr(module, name):
        name = "gradient_checkpointing_enable"
    getattr(module, name)()
    model = hs.load((module.eval(), None))
    assert torch.equal(model.capture(TEXTS).values, plain().values)  # type: ignore[union-attr]
    recorded: Any = hs.record(model, [TEXT], grad=True, logits=True)
    first = recorded.live[recorded.states.sites[0]]
    (slope,) = torch.autograd.grad(recorded.logits.sum(), first)
    assert slope.abs().max() > 0


# torch says so of its own parts when its compiler is first imported.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_wrapper_is_watched_inside_and_one_in_place_is_refused() -> None:
    module = tiny_model("llama")
    wrapper = torch.compile(module)
    model = hs.load((wrapper, None))
    assert model.module is module
    assert torch.equal(model.capture(TEXTS).values, plain().values)  # type: ignore[union-attr]
    with pytest.raises(ModuleError, match="compiled"), hs.recording(wrapper):
        pass
    for part in ("model.layers.1", ""):
        module = tiny_model("llama")
        model = hs.load((module, None))
        module.get_submodule(part).compile()
        with pytest.raises(ModuleError, match="compiled in place.*before `.compile"):
            hs.load((module, None))
        with pytest.raises(ModuleError, match="compiled in place"):
            model.capture([TEXT])


def test_a_module_without_numbers_and_copies_in_parallel_are_refused() -> None:
    half: Any = tiny_model("llama")
    half.model.layers[1].to("meta")
    for module in (tiny_model("llama").to("meta"), half):
        with pytest.raises(ModuleError, match="meta device"):
            hs.load((module, None))
    copies = nn.DataParallel(tiny_model("llama"))
    with pytest.raises(
        ModuleError, match="DataParallel runs copies of it.*module.module"
    ):
        hs.load((copies, None))


def offloaded(family: str, way: str, folder: Path) -> nn.Module:
    module = tiny_model(family)
    if way == "cpu":
        accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    elif way == "disk":
        accelerate.disk_offload(
            module, str(folder), execution_device=torch.device("cpu")
        )
    else:
        names = {name for name, _ in module.named_children()} - {"lm_head"}
        places = dict.fromkeys(names, "disk") | {"lm_head": "cpu"}
        accelerate.dispatch_model(
            module, places, main_device="cpu", offload_dir=str(folder)
        )
    return module


# Weights of gpt2 are tied.
@pytest.mark.parametrize(
    ("family", "way"), [("llama", "cpu"), ("llama", "device_map"), ("gpt2", "disk")]
)
def test_offloaded_weights_give_the_same_states_and_stay_where_they_were(
    family: str, way: str, tmp_path: Path, hanging: Hanging
) -> None:
    module = offloaded(family, way, tmp_path)
    assert hooks.is_offloaded(module)
    where = [weight.device for weight in module.parameters()]
    assert torch.device("meta") in where
    before = hanging(module)
    model = hs.load((module, None))
    assert model.device == torch.device("cpu")
    states = model.capture(TEXTS)
    early = model.capture(TEXTS, "layer.1")
    assert torch.equal(states.values, plain(family).values)  # type: ignore[union-attr]
    assert torch.equal(early["layer.1"], states["layer.1"])
    assert hs.record(model, [TEXT], "layer.1", logits=True).logits is not None
    assert states.source.weights == plain(family).source.weights
    assert [weight.device for weight in module.parameters()] == where
    now = hanging(module)
    assert {path: kept_hooks(own) for path, own in now.items()} == {
        path: kept_hooks(own) for path, own in before.items()
    }


def kept_hooks(own: dict[str, Any]) -> dict[str, Any]:
    """All but the weights, which come and go with every pass."""
    return {
        name: value for name, value in own.items() if not name.startswith("weight ")
    }


def test_hooks_of_accelerate_are_known_however_they_hang() -> None:
    module = tiny_model("llama")
    head: Any = module.lm_head
    kind, put = accelerate.hooks.AlignDevicesHook, accelerate.hooks.add_hook_to_module
    assert not hooks.is_offloaded(module)
    put(head, kind(execution_device="cpu"))
    assert not hooks.is_offloaded(module), (
        "a hook that only moves inputs leaves the weights where they are"
    )
    put(head, kind(execution_device="cpu", offload=True), append=True)
    assert type(head._hf_hook).__name__ == "SequentialHook"
    assert hooks.is_offloaded(module)


DTYPES = [("llama", torch.bfloat16), ("bert", torch.float16), ("llama", torch.float64)]


@pytest.mark.parametrize(("family", "dtype"), DTYPES)
def test_a_module_in_another_dtype(family: str, dtype: torch.dtype) -> None:
    module = tiny_model(family).to(dtype)
    model = hs.load((module, None))
    states: Any = model.capture(TEXTS)
    assert model.dtype == states.values.dtype == dtype
    assert model.batching.padding_safe, model.batching.reason
    assert states.source.dtype == str(dtype).removeprefix("torch.")
    with torch.no_grad():
        entries = module(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    alone: Any = model.capture([TEXT])
    assert all(torch.equal(alone[f"layer.{k}"], entries[k][0]) for k in range(3))
    for number, text in enumerate(TEXTS):
        assert states_disagreement(model.capture([text]), states.of(number)) <= 1  # type: ignore[arg-type]
    if dtype == torch.float64:
        # It is held to its own rounding.
        wrong = hs.States(
            alone.sites, alone.values * (1 + 1e-9), alone.tokens, alone.source
        )
        assert states_disagreement(alone, wrong) > 100


def test_more_than_the_free_memory_is_refused_before_any_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, passes = hs.load((tiny_model("llama"), None)), []
    handle = model.module.register_forward_pre_hook(lambda *_: passes.append(1))
    monkeypatch.setattr("hiddenscope.passes.buffers.free_memory", lambda: 2**20)
    said = (
        r"5 sites of 1,200 tokens, 64 wide in float32, do not fit in memory: they take"
        r" .* GiB"
    )
    with pytest.raises(TooLarge, match=said) as caught:
        model.capture([[5] * 100] * 12)
    assert isinstance(caught.value, MemoryError)
    assert "disk" in caught.value.remedy
    assert passes == []
    model.capture([[5] * 100], "layer.1")
    handle.remove()
    assert passes


def test_two_stacks_share_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hs.load((tiny_model("bart"), None))
    texts = [[5] * 100] * 6
    enough = int(1.5 * 4 * 600 * 64 * 4)  # for one of them
    monkeypatch.setattr("hiddenscope.passes.buffers.free_memory", lambda: enough)
    model.capture(texts, "encoder.layer.*")
    with pytest.raises(TooLarge):
        model.capture(texts, targets=texts)
