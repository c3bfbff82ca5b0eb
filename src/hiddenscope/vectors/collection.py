"""Collections: rows to search or cluster, from a model, from states or from an array.

>>> collection_of(np.eye(3), ["a", "b", "c"]).pick(np.array([0, 2])).tolist()
[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope import texts as reader
from hiddenscope.arguments import shown
from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.passes.text_encoder import conversations
from hiddenscope.results.report import Pooled
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Pooling, Readable, Source, States, Tokens
from hiddenscope.states.arrays import Ints
from hiddenscope.states.pooling import SINKLESS, vector_pooling
from hiddenscope.vectors.dataset import texts_of
from hiddenscope.vectors.pooled import compute, pooled_as, read_vectors
from hiddenscope.vectors.tally import Tally
from hiddenscope.vectors.vectors import (
    EachToken,
    check_unpooled,
    open_sites,
    single_site,
    vectors,
)

# At most this much of an array is read at a time.
MOST_ROWS = 32_768
MOST_BYTES = 2**26
# No text of a model of sentence-transformers has more tokens.
LONGEST = 2**24


@dataclass(frozen=True)
class Collection:
    """Rows to search or cluster, in order, and what is known of them.

    `pool` is what stands for a text: None where a row is a token, or in an array of
    which nobody said it.
    """

    count: int
    blocks: Callable[[], Iterator[Tensor]]
    pick: Callable[[Ints], Tensor]
    texts: Sequence[str] | None
    # Only where a row is a token.
    tokens: Tokens | None
    site: Site | None
    pool: Pooling | None
    source: Source | dict[str, Any]
    tally: Tally
    # Not of texts, to which what the model's folder says of these would apply.
    of_states: bool = False

    def pooled(self, values: Tensor, rows: Ints | None = None) -> Pooled | None:
        """Say what rules some of the rows, once they were read."""
        if self.site is None or self.tokens is not None:
            return None
        return self.tally.report((self.site,), values[None], self.pool, rows)

    @property
    def strings(self) -> Sequence[str] | None:
        """Return the text or the token of each row."""
        return self.texts if self.tokens is None else self.tokens.strings

    @property
    def unit(self) -> str:
        """Return what a row is: "text" or "token"."""
        return "text" if self.tokens is None else "token"

    @property
    def place(self) -> dict[str, Any]:
        """Return where rows were read and what a row is of, as facts name it.

        The token is "each" where every token is a row. Nothing is known of an array.
        """
        if self.site is None:
            return {}
        token = self.pool if self.tokens is None else "each"
        return {"site": str(self.site), "token": token}


def collection_of(
    source: Any,
    texts: Any = None,
    site: str | Site | None = None,
    pool: Pooling | None = None,
    truncate: bool = False,
) -> Collection:
    """Return the rows of a model with texts, of states, or of an array of vectors."""
    by_token = isinstance(source, EachToken)
    if isinstance(source, EachToken):
        check_unpooled(pool)
        source = source.source
    elif pool is not None:
        pool = vector_pooling(pool)
    if not isinstance(source, Model | Readable | Pair):
        return _of_array(source, texts, site, pool)
    pattern = last_site(source) if site is None else site
    opened, sites = open_sites(source, texts, pattern)
    selected = single_site(pattern, sites)
    if isinstance(opened, Model):
        model_texts = _texts_for(opened, texts, truncate)
        if not by_token:
            return _of_model(opened, model_texts, selected, pool, truncate)
        inputs = opened.encode(model_texts, truncate=truncate)
        captured = opened.capture(inputs, selected)
        assert isinstance(captured, States)  # the sites are of one stack
        opened = captured
    elif not by_token and pool is None:
        stored_as = pooled_as(opened)
        pool = SINKLESS if stored_as is None else stored_as
    return _of_states(opened, selected, pool)


def last_site(source: Model | Readable | Pair) -> Site:
    """Return `final`, or the last layer; of two stacks, the encoder's."""
    if isinstance(source, Model):
        sites = source.anatomy.select("layer.*,final")
    else:
        sites = source.sites
    stack = sites[0].stack
    return max(site for site in sites if site.stack == stack)


def as_trained(
    model: Model, texts: Any, pool: Pooling | None, truncate: bool | int
) -> tuple[Any, Pooling, bool | int]:
    """Return texts, pooling and truncation as the model's folder says.

    A folder of sentence-transformers names a longest text, a pooling, and perhaps what
    is put before a text. Lists of ids and Inputs are not touched.
    """
    trained = model.sentences
    if trained is None:
        return texts, SINKLESS if pool is None else pool, truncate
    if pool is None and trained.missing:
        raise StatesError(
            f"Cannot make the vectors of {model.name}",
            f"in sentence-transformers it {trained.missing}, and hiddenscope does not"
            " do that",
            'Choose another pooling, such as pool="mean".',
        )
    if pool is None:
        pool = trained.pool
    if isinstance(texts, Inputs | bytes | Mapping) or not isinstance(texts, Iterable):
        return texts, pool, truncate
    strings = [texts] if isinstance(texts, str) else reader.as_list(texts)
    if not all(isinstance(text, str) for text in strings):
        return strings, pool, truncate
    if trained.prompts:
        names = ", ".join(trained.prompts)
        progress.note(
            f"{model.name} has prompts ({names}) to put before a text; hs.embed uses"
            " none of them"
        )
    if trained.lower:
        strings = [text.lower() for text in strings]
    if trained.prompt:
        strings = [trained.prompt + text for text in strings]
    longest: float | None = trained.longest
    if longest is None:
        longest = float(getattr(model.tokenizer, "model_max_length", math.inf))
    # A tokenizer without a limit has an absurd one. The window holds then.
    window = model.text_encoder.window or LONGEST
    return strings, pool, int(min(LONGEST, window, longest))


def _texts_for(model: Model, texts: Any, truncate: bool) -> list[Any] | Inputs:
    """Return the texts of a model as a list or as Inputs."""
    texts = texts_of(texts)
    if isinstance(texts, Mapping) or conversations(texts) is not None:
        texts = model.encode(texts, truncate=truncate)
    if isinstance(texts, Inputs):
        return texts
    if isinstance(texts, str):
        return [texts]
    is_scalar = getattr(texts, "shape", None) == ()
    if not isinstance(texts, Iterable) or isinstance(texts, bytes) or is_scalar:
        remedy = "Give a list of strings, a file or a frame."
        raise TextError(
            f"No texts for {model.name}", f"texts are {shown(texts)}", remedy
        )
    return reader.as_list(texts)


def _of_model(
    model: Model,
    texts: list[Any] | Inputs,
    site: Site,
    pool: Pooling | None,
    truncate: bool,
) -> Collection:
    strings: Sequence[str] | None = None
    if isinstance(texts, Inputs):
        strings = texts.texts
    elif texts and all(isinstance(text, str) for text in texts):
        strings = texts
    pooled_texts, pooling, cut = as_trained(model, texts, pool, truncate)

    tally = Tally()

    def read() -> Iterator[Tensor]:
        portions = compute(model, pooled_texts, (site,), pooling, cut, tally)
        return (block[0] for _, block in portions)

    def pick(numbers: Ints) -> Tensor:
        if isinstance(pooled_texts, Inputs):
            some: Any = pooled_texts.some(numbers.tolist())
        else:
            some = [pooled_texts[number] for number in numbers]
        rows = vectors(model, some, sites=site, pool=pooling, truncate=cut, tally=tally)
        return rows.values[0]

    source = model.source(site.stack)
    return Collection(
        len(texts), read, pick, strings, None, site, pooling, source, tally
    )


def _of_states(states: Readable, site: Site, pool: Pooling | None) -> Collection:
    tokens = states.tokens
    tally = Tally()

    def read() -> Iterator[Tensor]:
        return read_vectors(states, site, pool, tally=tally)

    def pick(numbers: Ints) -> Tensor:
        # The numbers ascend.
        picked = []
        done = 0
        for block in read():
            inside = (numbers >= done) & (numbers < done + len(block))
            picked.append(block[torch.from_numpy(numbers[inside] - done)])
            done += len(block)
        return torch.cat(picked)

    return Collection(
        len(tokens) if pool is None else tokens.count,
        read,
        pick,
        tokens.texts,
        tokens if pool is None else None,
        site,
        pool,
        getattr(states, "source", None) or {},
        tally,
        of_states=True,
    )


def _of_array(
    source: Any, texts: Any, site: str | Site | None, pool: Pooling | None
) -> Collection:
    is_floating = False
    values = source
    if isinstance(source, Tensor) and not source.is_meta:
        is_floating = source.is_floating_point()
        values = source.detach().cpu()
    elif isinstance(source, np.ndarray):
        is_floating = source.dtype.kind == "f"
    if not is_floating or source.ndim != 2 or 0 in source.shape:
        description = type(source).__name__
        if hasattr(source, "dtype"):
            description = f"{source.dtype} {list(source.shape)}"
        raise StatesError(
            "Cannot read vectors",
            f"got {description}",
            "Give a model with texts=, states, or an array [text, width] of floats.",
        )
    strings = None
    if texts is not None:
        several = [texts] if isinstance(texts, str) else texts
        strings = reader.as_list(texts_of(several))
        if len(strings) != len(values):
            reason = f"there are {len(values):,} vectors and {len(strings):,} texts"
            raise TextError(
                "Texts do not fit the vectors", reason, "Give one for each, or none."
            )
    named = None
    if site is not None:
        named = site if isinstance(site, Site) else Site.parse(site)
    if pool is None and named is not None:
        pool = SINKLESS

    def read() -> Iterator[Tensor]:
        row_bytes = values.itemsize * values.shape[1]
        rows = max(1, min(MOST_ROWS, MOST_BYTES // row_bytes))
        for start in range(0, len(values), rows):
            yield _as_tensor(values[start : start + rows])

    def pick(numbers: Ints) -> Tensor:
        return _as_tensor(values[numbers])

    return Collection(len(values), read, pick, strings, None, named, pool, {}, Tally())


def _as_tensor(rows: Any) -> Tensor:
    """Return rows as a tensor, without a copy where torch can take the array."""
    if isinstance(rows, Tensor):
        return rows
    # torch takes neither a foreign byte order nor a read-only array.
    if not rows.dtype.isnative:
        rows = rows.astype(rows.dtype.newbyteorder("="))
    if not rows.flags.writeable:
        rows = np.array(rows)
    return torch.from_numpy(np.asarray(rows))
