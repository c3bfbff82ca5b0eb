"""Noise, and truths planted in tiny models: what analyses must not claim, and must find."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray

import hiddenscope as hs
from hiddenscope.analyses.graft.compute import compare_windows
from hiddenscope.directions.encoding import Encoding
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "his",
    "dog",
    "there",
    "is",
    "no",
    "end",
    "to",
    "it",
    "hat",
    "day",
]


def random_texts(generator: np.random.Generator, count: int) -> list[str]:
    return [
        " ".join(generator.choice(WORDS, generator.integers(4, 9)))
        for _ in range(count)
    ]


def random_model(seed: int, family: str = "llama") -> hs.Model:
    return hs.load((tiny_model(family, seed=seed), tiny_tokenizer()))


def random_states(
    generator: np.random.Generator, texts: int, sites: int = 3, width: int = 6
) -> hs.States:
    values = torch.from_numpy(generator.standard_normal((sites, texts, width))).float()
    names = [f"text {number}" for number in range(texts)]
    tokens = hs.Tokens(names, range(texts), [0] * texts, range(texts), ["t"] * texts)
    return hs.States(tuple(map(Site, range(sites))), values, tokens, hs.Source("toy"))


def flips(generator: np.random.Generator, count: int) -> list[str]:
    """Labels that mean nothing, some of each."""
    labels = np.array(["a", "b"])[generator.integers(0, 2, count)]
    labels[:4] = ["a", "b", "a", "b"]
    return list(map(str, generator.permutation(labels)))


def random_graft(generator: np.random.Generator, right: Any = None) -> hs.Result:
    """What `hs.graft` makes of answers that are right by chance, whichever blocks are
    the donor's.
    """
    windows = [(Site(k),) for k in range(1, 13)]
    right = generator.random((12, 10)) < 0.6 if right is None else right
    facts = compare_windows(
        windows,
        right,
        {"model": right[0], "donor": right[1]},
        depth=12,
        groups=np.arange(right.shape[1]),
    )
    base = {
        "donor": "other",
        "prompts": right.shape[1],
        "copies": 0,
        "groups": right.shape[1],
        "grafted": "blocks",
        "layers": 1,
        "notes": [],
    }
    share = right.mean(1).astype(np.float32)
    columns = dict.fromkeys(
        ("accuracy", "accuracy_low", "accuracy_high", "probability"), ("site", share)
    )
    data = xarray.Dataset(columns, {"site": [str(window[0]) for window in windows]})
    return hs.Result("graft", data, {**base, **facts}, {"model": "toy"})


def sparse_states(
    generator: np.random.Generator, directions: Any, texts: int = 12
) -> hs.States:
    """States that are sums of two directions each, in texts of eight tokens."""
    count = texts * 8
    values = np.zeros((1, count, directions.shape[1]), dtype=np.float32)
    for row in range(count):
        for feature in generator.choice(len(directions), 2, replace=False):
            values[0, row] += generator.uniform(1, 2) * directions[feature]
    tokens = hs.Tokens(
        [f"text {number}" for number in range(texts)],
        np.repeat(np.arange(texts), 8),
        np.tile(np.arange(8), texts),
        np.arange(count),
        ["t"] * count,
    )
    return hs.States((Site(1),), torch.from_numpy(values), tokens, hs.Source("toy"))


def unit_directions(seed: int, count: int = 24, width: int = 12) -> Any:
    drawn = np.random.default_rng(seed).standard_normal((count, width))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def feature_noise(generator: np.random.Generator) -> hs.Result:
    """A dictionary that is drawn as the one that it is compared with."""
    states = sparse_states(generator, np.eye(12))
    return hs.features(
        states, dictionary="random", site="layer.1", data=flips(generator, 12)
    )


def features_of_states() -> hs.Result:
    """The directions that states are made of, twice as many as states are wide."""
    directions = unit_directions(0)
    states = sparse_states(np.random.default_rng(0), directions)
    dictionary = hs.Dictionary.of(directions, "layer.1")
    # What acts is known: it is what is found when the two largest are fitted.
    encoding = Encoding("topk", k=2)
    return hs.features(states, dictionary=replace(dictionary, encoding=encoding))


def circuit_noise(generator: np.random.Generator) -> hs.Result:
    """Circuits for tokens that mean nothing, tested on prompts that did not choose."""
    tokens = generator.choice(np.arange(9, 99), 16, replace=False).tolist()
    contrasts = []
    for number in range(8):
        clean, corrupt = [5, tokens[number], 7], [5, tokens[number + 8], 7]
        contrasts.append(hs.Contrast(clean, corrupt, 11, 12))
    return hs.circuit(random_model(3), contrasts, random=1, method="gradient")


def compare_noise(generator: np.random.Generator) -> hs.Result:
    return hs.compare(random_model(1), *random_texts(generator, 2))


def steer_noise(generator: np.random.Generator) -> hs.Result:
    model, texts = random_model(2), random_texts(generator, 5)
    direction = hs.Direction.between(model, texts[:2], texts[2:4], sites="layer.1-2")
    given: dict[str, Any] = {
        "strengths": (-1.0, 1.0),
        "answers": ["a", "e"],
        "quality": texts[:2],
        "new_tokens": 0,
    }
    return hs.steer(model, texts[4], direction, **given)


def patch_noise(generator: np.random.Generator) -> hs.Result:
    word, other = generator.choice(WORDS, 2, replace=False)
    return hs.patch(
        random_model(3),
        hs.Contrast(f"the cat and {word} sat", f"the cat and {other} sat", "a", "e"),
    )


def exchanges(count: int) -> list[hs.Interchange]:
    """Pairs of which the last token but one and the last differ."""
    answers = (11, 12, 13)
    pairs = []
    for k in range(count):
        base, source = [40 + k, 6, 7], [40 + k, 8, 9]
        answer, other = answers[k % 3], answers[(k + 1) % 3]
        pairs.append(hs.Interchange(base, source, answer, other, at=-1))
    return pairs


def signed_model() -> hs.Model:
    """A model in which the first number of the last token's embedding decides, by its
    sign, between the answers 11 and 12.
    """
    module: Any = tiny_model("llama", layers=2)
    with torch.no_grad():
        for block in module.model.layers:
            block.self_attn.o_proj.weight.mul_(1e-3)
            block.mlp.down_proj.weight.mul_(1e-3)
        embeddings = module.model.embed_tokens.weight
        generator = torch.Generator().manual_seed(0)
        embeddings[20:60] = torch.randn(40, 64, generator=generator)
        embeddings[20:60:2, 0], embeddings[21:60:2, 0] = 3, -3
        module.lm_head.weight[[11, 12]] = 0
        module.lm_head.weight[11, 0], module.lm_head.weight[12, 0] = 1, -1
    return hs.load((module, tiny_tokenizer()))


def signed_pairs(count: int, seed: int = 0) -> list[hs.Interchange]:
    """Pairs whose last tokens have different signs, in both directions."""
    random = np.random.default_rng(seed)
    pairs = []
    for k in range(count):
        signs = [k % 2, 1 - k % 2]
        last = [20 + 2 * int(random.integers(20)) + sign for sign in signs]
        filler = random.choice(30, 2, replace=False) + 60
        base, source = ([int(f), t] for f, t in zip(filler, last, strict=True))
        pairs.append(hs.Interchange(base, source, 11 + signs[0], 11 + signs[1], *signs))
    return pairs


def variable_noise(generator: np.random.Generator) -> hs.Result:
    """Counterfactuals that are any of three answers, whatever the source is."""
    pairs = []
    for _ in range(10):
        base, source = generator.integers(20, 90, (2, 3)).tolist()
        answer, other = generator.choice([11, 12, 13], 2, replace=False).tolist()
        pairs.append(hs.Interchange(base, source, answer, other))
    return hs.variable(random_model(2), pairs, sites="layer.1", tokens=[-1])


def edges_noise(generator: np.random.Generator) -> hs.Result:
    """Edges for two tokens that mean nothing, between answers that mean nothing."""
    word, other, *answers = generator.choice(np.arange(9, 99), 4, replace=False)
    contrast = hs.Contrast(
        [5, 6, int(word), 7], [5, 6, int(other), 7], *map(int, answers)
    )
    return hs.edges(random_model(3), contrast)


def drift_noise(generator: np.random.Generator, factor: float = 1.0) -> hs.Result:
    """A model against itself with another attention kernel, which rounds differently;
    or with a weight that is off.
    """
    seed = int(generator.integers(9))
    other: Any = tiny_model("llama", seed=seed)
    other.set_attn_implementation("eager")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0].mul_(factor)
    return hs.drift(
        random_model(seed), (other, tiny_tokenizer()), random_texts(generator, 3)
    )


def planted_direct_path() -> hs.Result:
    """Blocks that add next to nothing leave one edge: from the embeddings to the logits.

    Its prompts differ in their last token.
    """
    module: Any = tiny_model("llama")
    with torch.no_grad():
        for block in module.model.layers:
            block.self_attn.o_proj.weight.mul_(1e-4)
            block.mlp.down_proj.weight.mul_(1e-4)
    contrasts = []
    for number in range(8):
        clean, corrupt = [5, 6, 20 + number], [5, 6, 40 + number]
        contrasts.append(hs.Contrast(clean, corrupt, 20 + number, 40 + number))
    return hs.circuit((module, None), contrasts, random=1)


def massive() -> hs.Result:
    values = torch.ones(2, 6, 8) * torch.linspace(0.5, 1.5, 8)
    values[1, 3, 2] = 5_000
    tokens = hs.Tokens(["a text"], [0] * 6, range(6), range(6), list("abcdef"))
    return hs.profile(hs.States((Site(0), Site(1)), values, tokens, hs.Source("toy")))


def with_idle_block(block: int) -> hs.Model:
    """A model with a block, counted from 1, that adds next to nothing."""
    module: Any = tiny_model("llama")
    idle = module.model.layers[block - 1]
    with torch.no_grad():
        for weight in (idle.self_attn.o_proj.weight, idle.mlp.down_proj.weight):
            weight.mul_(1e-4)
    return hs.load((module, tiny_tokenizer()))


def apart(offset: float = 4.0) -> tuple[hs.States, list[str]]:
    generator = np.random.default_rng(0)
    labels = ["a", "b"] * 20
    states = random_states(generator, 40)
    values = states.values.clone()
    values[1] += offset * torch.tensor([[float(label == "a")] for label in labels])
    return hs.States(states.sites, values, states.tokens, states.source), labels


def examples_of(generator: np.random.Generator, share: float = 0.0) -> hs.Result:
    """What `hs.examples` makes of random states, of which one kind of token may point
    along the direction in this share of its tokens.
    """
    ids = generator.integers(9, size=720)
    tokens = hs.Tokens(
        None,
        np.repeat(np.arange(60), 12),
        np.tile(np.arange(12), 60),
        ids,
        [f"t{token}" for token in ids],
    )
    values = torch.from_numpy(generator.standard_normal((1, 720, 6))).float()
    values[0, :, 0] += 6.0 * torch.from_numpy(
        (ids == 4) & (generator.random(720) < share)
    )
    states = hs.States((Site(1),), values, tokens, hs.Source("toy"))
    return hs.examples(states, hs.Direction.of(np.eye(6)[0], sites="layer.1"), k=3)


def steered_far() -> hs.Result:
    model = random_model(0)
    token = model.encode("a").ids[0][-1]
    weight = model.module.get_output_embeddings().weight[token].detach()  # type: ignore[operator, union-attr]
    direction = hs.Direction.of(weight / weight.norm() * 0.3, sites="layer.3")
    texts = random_texts(np.random.default_rng(0), 3)
    return hs.steer(
        model,
        texts[0],
        direction,
        strengths=(1.0,),
        answers=["a"],
        quality=texts,
        new_tokens=0,
    )


def clouds() -> hs.Result:
    generator = np.random.default_rng(0)
    return hs.cluster(
        np.repeat(np.eye(3, 8) * 5, 20, axis=0)
        + 0.2 * generator.standard_normal((60, 8))
    )


def planted_head() -> hs.Result:
    """A head whose values all point to the answer writes it."""
    module: Any = tiny_model("llama")
    word = module.lm_head.weight[11] - module.lm_head.weight[12]
    attention = module.model.layers[1].self_attn
    with torch.no_grad():
        # Its values are such that the sum of them is above zero at the last token.
        attention.o_proj.weight[:, 32:48] += 3 * word[:, None]
    return hs.contributions((module, None), [5, 6, 7, 8], 11, 12)


def one_path_model() -> Any:
    """A llama in which head 2 of block 1 and the MLP of block 2 alone do something."""
    module: Any = tiny_model("llama")
    with torch.no_grad():
        for layer, block in enumerate(module.model.layers, 1):
            # A block that adds nothing at all is no block.
            if layer != 2:
                block.mlp.down_proj.weight.mul_(1e-4)
            kept = torch.full((64,), 1e-4)
            if layer == 1:
                kept[32:48] = 4
                # It reads all tokens alike.
                block.self_attn.q_proj.weight[32:48] = 0
            block.self_attn.o_proj.weight.mul_(kept)
    return module


def planted_path() -> hs.Result:
    """Prompts that differ at a token that one head alone reads."""
    contrast = hs.Contrast([7, 99, 31], [7, 45, 31], answer=60, other=70)
    return hs.edges((one_path_model(), None), contrast)


def previous_token_model() -> Any:
    """A GPT-2 whose head 2 of block 1 reads the previous token by its position."""
    module: Any = tiny_model("gpt2")
    generator = torch.Generator().manual_seed(0)
    width, dim = 64, 16
    # One direction of the residual stream for each position, and one key for each.
    keys = torch.nn.functional.normalize(torch.randn(width, dim, generator=generator))
    block = module.transformer.h[0]
    with torch.no_grad():
        module.transformer.wpe.weight.zero_()
        module.transformer.wpe.weight[:width] = 100 * torch.eye(width)
        block.ln_1.weight.fill_(1)
        block.ln_1.bias.zero_()
        for start, rows in ((0, keys.roll(1, 0)), (width, keys)):
            columns = slice(start + 2 * dim, start + 3 * dim)
            block.attn.c_attn.weight[:, columns] = 2 * rows
            block.attn.c_attn.bias[columns] = 0
    return module
