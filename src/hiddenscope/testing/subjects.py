"""Subjects: the models that every check is tried on, and what there is to ask of each.

A subject is a tiny real model of a shape that breaks things: attention and MLP that
share a norm, multipliers, positions that begin at two, two stacks, no head, no padding
token. Its texts, prompts and answers are such that every analysis can be asked about
it with the same words.

>>> subject = SUBJECTS["llama"]
>>> subject.model.name, subject.site, subject.encoder_decoder
('LlamaForCausalLM', 'layer.1', False)
>>> SUBJECTS["t5"].site
'decoder.layer.1'
"""

import copy
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.testing.models import (
    PlainGPT,
    block_path,
    tiny_model,
    tiny_tokenizer,
)

# Of different lengths, so that a batch of them is padded.
TEXTS = ("The cat sat on the mat.", "A rest of it.", "On the mat or on the cat.", "No.")
# Two tokens each, of which neighbours share one: prompts about them align.
WORDS = ("cat", "fat", "pat", "pen", "ten", "ton", "won", "con")
TARGETS = (15, 16, 17)
ANSWER, RIVAL, THIRD = 20, 21, 22
EPSILONS = {"eps", "variance_epsilon"}


class Unavailable(Exception):
    """A subject that needs a package which is not installed."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under trial, and what to ask of it.

    `build` makes its module from a seed. `scaled` names the weights that write to the
    residual stream: with all of them multiplied by one number, the `factor`, a model
    that normalises what it reads computes the same. `requires` is a package that it
    cannot do without. The dtype of one that is not `castable` cannot be changed. `pad`
    gives its tokenizer a padding token.
    """

    name: str
    build: Callable[[int], nn.Module]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    pad: bool = True
    scaled: tuple[str, ...] = ()
    requires: str = ""
    castable: bool = True
    factor: float = 1.0

    @cached_property
    def module(self) -> nn.Module:
        """The module, in the dtype and on the device of the subject."""
        return self.built(0)

    @classmethod
    def of(cls, model: hs.Model) -> "Subject":
        """Return a subject whose model is this one, such as one of your own.

        It has the model's dtype, device and tokenizer; without one, the tiny one.

        >>> Subject.of(hs.load((tiny_model("gpt2"), tiny_tokenizer()))).site
        'layer.1'
        """

        def build(seed: int) -> nn.Module:
            return _redrawn(model.module, seed)

        weight = next(model.module.parameters())
        subject = cls(model.name, build, weight.dtype, str(weight.device))
        vars(subject).update(model=model, module=model.module)
        if model.tokenizer is not None:
            vars(subject)["tokenizer"] = model.tokenizer
        return subject

    @cached_property
    def model(self) -> hs.Model:
        """The model, loaded once; no check may change it."""
        return self.load(self.module)

    @cached_property
    def donor(self) -> hs.Model:
        """A model of the same shape with other weights."""
        return self.load(self.built(1))

    @cached_property
    def faulty(self) -> hs.Model:
        """A copy with a fault in its last block: a column of a matrix is off by half.

        A matrix that is off as a whole makes no difference where a norm comes after it.
        """
        module = copy.deepcopy(self.module)
        block = module.get_submodule(block_path(module, -1))
        weights = [
            weight
            for weight in block.parameters()
            # A quantised weight is no number that can be changed.
            if type(weight.data) is torch.Tensor
        ]
        with torch.no_grad():
            max(reversed(weights), key=_is_matrix)[..., 0].mul_(1.5)
        return self.load(module)

    def built(self, seed: int) -> nn.Module:
        """Build a fresh module from a seed."""
        if self.requires and importlib.util.find_spec(self.requires) is None:
            raise Unavailable(f"{self.name} needs {self.requires}")
        module = self.build(seed).eval()
        if self.dtype != torch.float32:
            module = module.to(self.dtype)
        module = module.to(self.device)
        config: Any = getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            config.decoder_start_token_id = 1
        return module

    def load(self, module: nn.Module) -> hs.Model:
        """Load a module with the tokenizer of the subject."""
        return hs.load((module, self.tokenizer))

    @cached_property
    def tokenizer(self) -> Any:
        """A tokenizer whose unknown token is the mask."""
        tokenizer: Any = tiny_tokenizer(pad=self.pad)
        tokenizer.mask_token = tokenizer.unk_token
        return tokenizer

    @cached_property
    def in_float64(self) -> "Subject":
        """The same subject in float64."""
        return replace(self, name=f"{self.name} in float64", dtype=torch.float64)

    @cached_property
    def in_bfloat16(self) -> "Subject":
        """The same subject in bfloat16."""
        return replace(self, name=f"{self.name} in bfloat16", dtype=torch.bfloat16)

    @cached_property
    def redrawn(self) -> "Subject":
        """The same subject with other weights."""

        def build(seed: int) -> nn.Module:
            return self.build(seed + 2)

        return replace(self, name=f"{self.name} with other weights", build=build)

    @cached_property
    def rounding(self) -> float:
        """What the largest of some numbers may be off by, as a share of it."""
        return 40 * torch.finfo(self.dtype).eps

    @cached_property
    def on_gpu(self) -> "Subject":
        """The same subject on a GPU."""
        return replace(self, name=f"{self.name} on a GPU", device="cuda")

    def multiplied(self, factor: float) -> "Subject":
        """Return the subject with all that writes to its residual stream multiplied."""

        def build(seed: int) -> nn.Module:
            module = self.build(seed)
            _untie(module)
            # What a norm adds to a variance is no part of the stream.
            for part in module.modules():
                for name in EPSILONS & vars(part).keys():
                    setattr(part, name, 1e-12)
            with torch.no_grad():
                for name, weight in module.named_parameters():
                    if name.split(".")[-2] in self.scaled:
                        weight.mul_(factor)
            return module

        name = f"{self.name} times {factor:g}"
        return replace(self, name=name, build=build, factor=factor)

    @cached_property
    def uniform(self) -> "tuple[Subject, int]":
        """The subject with a head that makes every word as likely, and how many there
        are.
        """

        def build(seed: int) -> nn.Module:
            module = self.build(seed)
            head = _untie(module)
            with torch.no_grad():
                for weight in head.parameters():
                    weight.zero_()
            return module

        subject = replace(self, name=f"{self.name} without a preference", build=build)
        logits = hs.record(subject.model, self.inputs, (), logits=True).logits
        assert logits is not None  # a model without a head has no entropy
        return subject, int(logits[0].isfinite().sum())

    @property
    def encoder_decoder(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return self.model.encoder_decoder

    @property
    def causal(self) -> bool:
        """Whether its decoder, or only stack, sees earlier tokens alone."""
        return self.model.anatomy.stacks[-1].causal

    @property
    def fills_in(self) -> bool:
        """Whether the model predicts masked tokens, and no next ones."""
        return not self.causal and not self.encoder_decoder

    @property
    def prefix(self) -> str:
        """What begins the sites of its decoder; empty where there is one stack."""
        return "decoder." if self.encoder_decoder else ""

    @property
    def site(self) -> str:
        """A state in the middle of its decoder, or of its only stack."""
        return f"{self.prefix}layer.1"

    @cached_property
    def sites(self) -> Mapping[str, str]:
        """A site of every kind, by what it is."""
        kinds = {
            "layer.0": "layer.0",
            "last": f"layer.{self.model.anatomy.stacks[-1].depth}",
            "final": "final",
            "part": "layer.2.mlp",
            "head": "layer.1.attn.head.1",
            "neuron": "layer.1.mlp.neuron.3",
            "queries": "layer.1.attn.q",
        }
        sites = {kind: f"{self.prefix}{site}" for kind, site in kinds.items()}
        if self.encoder_decoder:
            sites["encoder"] = "encoder.layer.1"
            sites["cross"] = "decoder.layer.1.cross"
        return sites

    def prompt(self, text: str) -> str:
        """Return a text as a prompt: with a mask after it where the model fills in."""
        mask = getattr(self.tokenizer, "mask_token", None) or "<unk>"
        return f"{text}{mask}." if self.fills_in else text

    @property
    def texts(self) -> list[str]:
        """Some texts of different lengths."""
        return [self.prompt(text) for text in TEXTS]

    @property
    def inputs(self) -> Any:
        """The texts, encoded with a decoder's text where there is one."""
        if not self.encoder_decoder:
            return self.texts
        return self.model.encode(self.texts, targets=[TARGETS] * len(self.texts))

    @property
    def one_input(self) -> Any:
        """The first text, encoded with a decoder's text where there is one."""
        if not self.encoder_decoder:
            return self.texts[0]
        return self.model.encode(self.texts[:1], targets=[TARGETS])

    def targets(self, count: int = 1) -> dict[str, Any]:
        """Return the argument for the decoder's texts of some prompts; empty where
        there is no decoder beside an encoder.
        """
        return {"targets": [list(TARGETS)] * count} if self.encoder_decoder else {}

    @property
    def target(self) -> dict[str, Any]:
        """The decoder's text as a contrast takes it; empty without one."""
        return {"targets": list(TARGETS)} if self.encoder_decoder else {}

    @property
    def contrasts(self) -> list[hs.Contrast]:
        """Eight contrasts, whose prompts differ in one token."""
        pairs = zip(WORDS, (*WORDS[1:], WORDS[0]), strict=True)
        return [
            hs.Contrast(
                self.prompt(f"the {word} sat"),
                self.prompt(f"the {other} sat"),
                ANSWER,
                RIVAL,
                **self.target,
            )
            for word, other in pairs
        ]

    @property
    def pairs(self) -> list[hs.Interchange]:
        """Eight interchanges, with answers that mean nothing."""
        answers = (ANSWER, RIVAL, THIRD)
        return [
            hs.Interchange(
                self.prompt(f"the {word} sat"),
                self.prompt(f"the {WORDS[k - 1]} sat"),
                answers[k % 3],
                answers[(k + 1) % 3],
            )
            for k, word in enumerate(WORDS)
        ]

    @property
    def labelled(self) -> tuple[list[str], list[int]]:
        """Twelve texts with two labels, which the first words give away."""
        labels = [k % 2 for k in range(12)]
        words = ("on or of", "the cat")
        return [f"{words[k % 2]} number {k}" for k in range(12)], labels

    @property
    def answered(self) -> list[tuple[str, int]]:
        """Prompts with an answer each."""
        answers = (ANSWER, RIVAL, THIRD, ANSWER)
        return list(zip(self.texts, answers, strict=True))

    @property
    def direction(self) -> hs.Direction:
        """A direction at the site, of any numbers."""
        width = self.model.anatomy.stacks[-1].proof.width
        numbers = self.factor * torch.linspace(-1, 1, width)
        return hs.Direction.of(numbers, sites=self.site)

    @property
    def dictionary(self) -> hs.Dictionary:
        """Twice as many directions as states are wide, of any numbers."""
        width = self.model.anatomy.stacks[-1].proof.width
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2 * width, width, generator=generator)
        return hs.Dictionary.of(rows.numpy(), self.site)


def _is_matrix(weight: torch.Tensor) -> bool:
    return weight.ndim > 1


def _untie(module: nn.Module) -> Any:
    """Give the head of a module weights of its own, and return it."""
    find = getattr(
        module, "get_output_embeddings", lambda: getattr(module, "head", None)
    )
    head: Any = find()
    head.weight = nn.Parameter(head.weight.detach().clone())
    return head


def _redrawn(module: nn.Module, seed: int) -> nn.Module:
    """Copy a module with the rows of its matrices in another order, but for seed 0."""
    copied = copy.deepcopy(module)
    if seed == 0:
        return copied
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in copied.parameters():
            if weight.ndim > 1:
                order = torch.randperm(len(weight), generator=generator)
                weight.copy_(weight[order.to(weight.device)].clone())
    return copied


def _shape(family: str, task: str | None = None) -> Callable[[int], nn.Module]:
    def build(seed: int) -> nn.Module:
        return tiny_model(family, task=task, seed=seed)

    return build


def _adapted(seed: int) -> nn.Module:
    """Build a model with an adapter of which every weight acts."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted: Any = peft.get_peft_model(tiny_model("llama", seed=seed), config)
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.2)
    module: nn.Module = adapted.eval()
    return module


def _quantised(seed: int) -> nn.Module:
    """Build a model whose matrices are 8-bit integers."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    module = tiny_model("llama", seed=seed)
    blocks = module.get_submodule(block_path(module, 1).rpartition(".")[0])
    quantize_(blocks, Int8WeightOnlyConfig())
    return module


def _subjects(rows: Sequence[Subject]) -> dict[str, Subject]:
    return {row.name: row for row in rows}


LLAMA = ("embed_tokens", "o_proj", "down_proj")

SUBJECTS: dict[str, Subject] = _subjects(
    [
        Subject("llama", _shape("llama"), scaled=LLAMA),
        Subject("bert", _shape("bert")),
        Subject("t5", _shape("t5")),
        Subject("gpt2", _shape("gpt2"), scaled=("wte", "wpe", "c_proj")),
        Subject("gemma3", _shape("gemma3_text")),
        Subject("phi", _shape("phi"), scaled=("embed_tokens", "dense", "fc2")),
        Subject("cohere", _shape("cohere"), scaled=LLAMA),
        Subject("gpt_neox", _shape("gpt_neox")),
        Subject("gptj", _shape("gptj"), scaled=("wte", "out_proj", "fc_out")),
        Subject("granite", _shape("granite"), scaled=LLAMA),
        Subject("mixtral", _shape("mixtral")),
        Subject("olmo2", _shape("olmo2")),
        Subject("mpt", _shape("mpt")),
        Subject("bloom", _shape("bloom")),
        Subject("xglm", _shape("xglm")),
        Subject("opt", _shape("opt")),
        Subject("qwen3", _shape("qwen3"), scaled=LLAMA),
        Subject("mamba", _shape("mamba"), scaled=("embeddings", "out_proj")),
        Subject("roberta", _shape("roberta")),
        Subject("bart", _shape("bart")),
        Subject("canine", _shape("canine")),
        Subject("plain", PlainGPT),
        Subject("bfloat16", _shape("llama"), dtype=torch.bfloat16),
        Subject("adapter", _adapted, requires="peft"),
        Subject("int8", _quantised, requires="torchao", castable=False),
        Subject("unpadded", _shape("llama"), pad=False),
    ]
)
