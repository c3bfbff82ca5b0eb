"""The module as other people's programs leave it: watched rightly, or refused with the
reason.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.errors import ModuleError, TooLarge
from hiddenscope.model.batching import states_disagreement
from hiddenscope.modules import hooks
from hiddenscope.testing import tiny_model

Hanging = Callable[[nn.Module], dict[str, Any]]
TEXT = [7, 99, 23, 64, 31, 8]
TEXTS = [TEXT, TEXT[:2], [50, 51, 52]]
# torch says so of its own parts when its compiler is first imported.
COMPILES = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@cache
def plain(family: str = "llama") -> Any:
    return hs.load((tiny_model(family), None)).capture(TEXTS)


@pytest.mark.parametrize("part", ["", "model.layers.1.self_attn"])
def test_a_module_in_train_mode_is_refused(part: str) -> None:
    module = tiny_model("llama")
    module.get_submodule(part).train()
    with pytest.raises(
        ModuleError,
        match=f"train\\(\\) mode{f' at {part}' if part else ''}.*module.eval\\(\\)",
    ):
        hs.load((module, None))
    assert module.get_submodule(part).training


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


class _Looks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if self.training else x


class _DropsMore(nn.Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.training)


class _Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _overridden() -> nn.Module:
    module = nn.Identity()
    module.forward = _Reads().forward  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    "make",
    [
        *(
            _Reads,
            _Calls,
            _Inherits,
            _Looks,
            _overridden,
            nn.Dropout,
            lambda: nn.BatchNorm1d(64),
            nn.RReLU,
        ),
        *(lambda: _DropsMore(0.0), lambda: nn.MultiheadAttention(64, 4, dropout=0.1)),
        *(
            lambda: nn.LSTM(64, 64, 2, dropout=0.1),
            lambda: nn.Sequential(nn.GELU(), nn.Dropout()),
        ),
    ],
)
def test_what_computes_something_else_in_train_mode_is_refused(
    make: Callable[[], nn.Module],
) -> None:
    module = tiny_model("llama")
    module.model.layers[1].mlp.extra = make()  # type: ignore
    with pytest.raises(
        ModuleError, match=r"train\(\) mode at model.layers.1.mlp.extra"
    ):
        hs.load((module, None))


@pytest.mark.parametrize(
    "make",
    [
        *(
            nn.GELU,
            nn.Identity,
            nn.SiLU,
            _Plain,
            lambda: nn.Linear(4, 4),
            lambda: nn.LayerNorm(4),
        ),
        *(
            lambda: nn.RMSNorm(4),
            lambda: nn.Embedding(4, 4),
            lambda: nn.Dropout(0.0),
            nn.ModuleList,
        ),
        *(
            lambda: nn.MultiheadAttention(64, 4),
            lambda: nn.LSTM(64, 64),
            lambda: nn.InstanceNorm1d(4),
        ),
        *(
            lambda: nn.Sequential(nn.GELU(), nn.Tanh()),
            lambda: nn.TransformerEncoderLayer(64, 4, dropout=0.0),
        ),
    ],
)
def test_what_computes_the_same_in_train_mode_is_not(
    make: Callable[[], nn.Module],
) -> None:
    module = tiny_model("llama")
    module.model.layers[1].mlp.extra = made = make()  # type: ignore
    hs.load((module, None))
    assert made.training


def test_a_port_without_dropout_may_be_left_in_train_mode() -> None:
    plain_llama = importlib.import_module("tests.unit.analyses.test_drift_ports")
    candidate = plain_llama.port().train()
    assert not plain_llama.facts_of(candidate)["drifted"] and candidate.training
    candidate.blocks[1].act = nn.Dropout(0.1)
    with pytest.raises(ModuleError, match=r"train\(\) mode at blocks.1.act"):
        plain_llama.facts_of(candidate)


def test_a_module_put_in_train_mode_later_is_refused_then() -> None:
    module = tiny_model("gpt2")
    model = hs.load((module, None))
    module.train()
    ways: list[Callable[[], Any]] = [
        lambda: model.capture([TEXT]),
        lambda: hs.record(model, [TEXT]),
        lambda: model.capture_generation([TEXT]),
    ]
    for way in ways:
        with pytest.raises(ModuleError, match="train\\(\\) mode"):
            way()
    module.eval()
    assert torch.equal(model.capture(TEXTS).values, plain("gpt2").values)  # type: ignore[union-attr]


def test_a_part_in_train_mode_that_was_exchanged_later_is_refused_then() -> None:
    model = hs.load((tiny_model("llama"), None))
    model.capture([[5, 6, 7]])
    model.module.model.layers[1] = tiny_model("llama", seed=1).train().model.layers[1]  # type: ignore
    with pytest.raises(ModuleError, match=r"train\(\) mode at model.layers.1"):
        model.capture([[5, 6, 7]])


def test_a_loop_may_be_recorded_while_it_trains() -> None:
    module = tiny_model("llama").train()
    with hs.recording(module, "layer.1") as rec:
        module(torch.tensor([TEXT])).logits.sum().backward()
    assert (
        rec.states.values.shape == (1, 6, 64) and module.lm_head.weight.grad is not None
    )  # type: ignore[union-attr]


def test_gradient_checkpointing_changes_nothing() -> None:
    module = tiny_model("llama")
    module.gradient_checkpointing_enable()  # type: ignore[operator]
    model = hs.load((module.eval(), None))
    assert torch.equal(model.capture(TEXTS).values, plain().values)  # type: ignore[union-attr]
    recorded = hs.record(model, [TEXT], grad=True, logits=True)
    (slope,) = torch.autograd.grad(
        recorded.logits.sum(), recorded.live[recorded.states.sites[0]]
    )  # type: ignore
    assert slope.abs().max() > 0


@COMPILES
def test_a_compiled_wrapper_is_watched_inside() -> None:
    module = tiny_model("llama")
    model = hs.load((torch.compile(module), None))
    assert model.module is module
    assert torch.equal(model.capture(TEXTS).values, plain().values)  # type: ignore[union-attr]
    with (
        pytest.raises(ModuleError, match="compiled"),
        hs.recording(torch.compile(module)),
    ):
        pass


@COMPILES
@pytest.mark.parametrize("part", ["", "model.layers.1"])
def test_a_module_compiled_in_place_is_refused(part: str) -> None:
    module = tiny_model("llama")
    model = hs.load((module, None))
    module.get_submodule(part).compile()
    with pytest.raises(ModuleError, match="compiled in place.*before `.compile"):
        hs.load((module, None))
    with pytest.raises(ModuleError, match="compiled in place"):
        model.capture([TEXT])


def test_a_module_without_numbers_is_refused() -> None:
    with pytest.raises(ModuleError, match="meta device"):
        hs.load((tiny_model("llama").to("meta"), None))
    half = tiny_model("llama")
    half.model.layers[1].to("meta")  # type: ignore[union-attr, index, operator]
    with pytest.raises(ModuleError, match="meta device"):
        hs.load((half, None))


def test_copies_run_in_parallel_are_refused() -> None:
    with pytest.raises(
        ModuleError, match="DataParallel runs copies of it.*module.module"
    ):
        hs.load((nn.DataParallel(tiny_model("llama")), None))


def offloaded(family: str, way: str, folder: Path) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
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


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("llama", "cpu"),
        ("llama", "disk"),
        ("llama", "device_map"),
        ("gpt2", "cpu"),
        ("gpt2", "disk"),
    ],
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
    accelerate_hooks = pytest.importorskip("accelerate.hooks")
    module, aligned = (
        tiny_model("llama"),
        accelerate_hooks.AlignDevicesHook(execution_device="cpu", offload=True),
    )
    assert not hooks.is_offloaded(module)
    accelerate_hooks.add_hook_to_module(
        module.lm_head, accelerate_hooks.AlignDevicesHook(execution_device="cpu")
    )
    assert not hooks.is_offloaded(module), (
        "a hook that only moves inputs leaves the weights where they are"
    )
    accelerate_hooks.add_hook_to_module(module.lm_head, aligned, append=True)
    assert type(module.lm_head._hf_hook).__name__ == "SequentialHook"  # type: ignore[union-attr]
    assert hooks.is_offloaded(module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_module_in_another_dtype(family: str, dtype: torch.dtype) -> None:
    model = hs.load((tiny_model(family).to(dtype), None))
    states = model.capture(TEXTS)
    assert model.dtype == states.values.dtype == dtype  # type: ignore[union-attr]
    assert model.batching.padding_safe, model.batching.reason
    assert states.source.dtype == str(dtype).removeprefix("torch.")  # type: ignore[union-attr]
    with torch.no_grad():
        entries = (
            tiny_model(family)
            .to(dtype)(torch.tensor([TEXT]), output_hidden_states=True)
            .hidden_states
        )
    alone = model.capture([TEXT])
    assert all(torch.equal(alone[f"layer.{k}"], entries[k][0]) for k in range(3))
    for number, text in enumerate(TEXTS):
        assert states_disagreement(model.capture([text]), states.of(number)) <= 1  # type: ignore[union-attr, arg-type]


def test_double_precision_is_held_to_its_own_rounding() -> None:
    model = hs.load((tiny_model("llama").double(), None))
    one = model.capture([TEXT])
    wrong = hs.States(one.sites, one.values * (1 + 1e-9), one.tokens, one.source)  # type: ignore[union-attr, arg-type]
    assert states_disagreement(one, wrong) > 100  # type: ignore[arg-type]


def quantise_live(module: nn.Module) -> None:
    """Exchange the projections of the blocks for 4-bit ones, as a user would."""
    import bitsandbytes

    for path, part in list(module.named_modules()):
        if type(part) is not nn.Linear or path == "lm_head":
            continue
        rows, columns = part.weight.shape
        packed: Any = bitsandbytes.nn.Linear4bit(
            columns, rows, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        packed.weight = bitsandbytes.nn.Params4bit(
            part.weight.data, requires_grad=False, quant_type="nf4"
        )
        container, _, name = path.rpartition(".")
        setattr(module.get_submodule(container), name, packed.to("cpu").eval())


@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_quantised_modules(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(
            f"{library} is not installed, and is nothing that hiddenscope needs"
        )
    module = tiny_model("llama")
    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(module, Int8WeightOnlyConfig())
    else:
        quantise_live(module)
    model = hs.load((module, None))
    assert model.source().quantisation.startswith(library)
    with torch.no_grad():
        entries = module(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    alone = model.capture([TEXT])
    assert all(torch.equal(alone[f"layer.{k}"], entries[k][0]) for k in range(3))


def test_more_than_the_free_memory_is_refused_before_any_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, passes = hs.load((tiny_model("llama"), None)), []
    handle = model.module.register_forward_pre_hook(lambda *_: passes.append(1))
    monkeypatch.setattr("hiddenscope.passes.buffers.free_memory", lambda: 2**20)
    with pytest.raises(
        TooLarge,
        match=(
            r"5 sites of 1,200 tokens, 64 wide in float32, do not fit in memory: they"
            r" take .* GiB"
        ),
    ) as caught:
        model.capture([[5] * 100] * 12)
    assert (
        isinstance(caught.value, MemoryError)
        and "disk" in caught.value.remedy
        and passes == []
    )
    model.capture([[5] * 100], "layer.1")
    handle.remove()
    assert passes


def test_two_stacks_share_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hs.load((tiny_model("bart"), None))
    texts = [[5] * 100] * 6
    size = 4 * 600 * 64 * 4
    monkeypatch.setattr(
        "hiddenscope.passes.buffers.free_memory", lambda: int(1.5 * size)
    )
    model.capture(texts, "encoder.layer.*")
    with pytest.raises(TooLarge):
        model.capture(texts, targets=texts)
