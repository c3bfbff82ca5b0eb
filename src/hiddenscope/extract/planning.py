"""Planning: a corpus made into units of fixed sequences and batches, in one pass of the
tokenizer over its texts.

A sequence is what the model is given: the tokens of a text, or of one window of a long
text.

What a unit holds depends on the texts, the tokenizer and the model's batching alone, so
that a unit that is computed again, on like hardware, has the same bytes.
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from hiddenscope import progress
from hiddenscope.errors import PassError, StoreError, TextError
from hiddenscope.extract.corpus import Corpus, Identity, SeenTexts, Skips
from hiddenscope.loading import parse_dtype
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.passes.inputs import BATCH_TOKENS
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states.pool import check_cls
from hiddenscope.states.pooling import parse_pooling
from hiddenscope.store import StorePlan, StoreSequence, UnitDigest

# Of states: what is held in memory three times, and what a crash costs.
UNIT_BYTES = 256 * 10**6
MOST_TOKENS = 2**17  # of a unit
# Floating-point operations of a unit on a CPU: a minute of a slow one (16 GFLOP/s),
# seconds of a fast one. A GPU does as much in a moment, so there the bytes alone
# decide.
UNIT_WORK = 10**12
LEAST_TOKENS = 256  # of a unit that this limit closes: smaller batches are slower
CHUNK = 256  # texts that are tokenised at a time
CHUNK_CHARACTERS = 2**20
DTYPES = ("bfloat16", "float16", "float32")
_BESIDE = 48  # bytes that a store keeps of a token besides its states, at most


@dataclass(frozen=True)
class ExtractSpec:
    """What is to be kept of every text: the sites, how they are pooled, the dtype of
    the values, every n-th token.
    """

    sites: tuple[Site, ...]
    pool: str | None
    dtype: torch.dtype
    width: int
    every: int = 1

    @property
    def position(self) -> int | None:
        """The position of the token that stands for a text; None for every other
        pooling.
        """
        if self.pool is None:
            return None
        pooling = parse_pooling(self.pool)
        return pooling if isinstance(pooling, int) else None

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of states, a token's or a pooled one, at all sites."""
        return len(self.sites) * self.width * self.dtype.itemsize

    def bytes(self, sequences: int, tokens: int) -> int:
        """The bytes that a store takes, a little too many rather than too few."""
        rows = (
            -(-tokens // self.every) + sequences * (self.every > 1)
            if self.pool is None
            else sequences
        )
        return rows * self.row_bytes + tokens * _BESIDE + sequences * 256


def choose(
    model: Model, sites: SitePatterns, pool: str | int | None, dtype: Any, every: int
) -> ExtractSpec:
    """What is asked for, checked against the model."""
    if pool is not None and every > 1:
        reason = "a pooled store keeps one vector for each text or window"
        raise PassError(
            f"Cannot use every={every} with pool={pool!r}",
            reason,
            "Give one of the two.",
        )
    chosen = model.anatomy.select(sites)
    if not chosen:
        raise PassError(
            "No sites to extract",
            "the list is empty",
            "Name at least one, such as 'layer.*'.",
        )
    if model.encoder_decoder:
        chosen = _of_encoder(model, chosen, sites)
    widths = {model.anatomy.width(site): site for site in chosen}
    if len(widths) > 1:
        reason = " and ".join(
            f"{site} is {width} wide" for width, site in widths.items()
        )
        raise PassError(
            "Cannot keep these states together",
            reason,
            "Extract them into stores of their own.",
        )
    stored = (
        parse_dtype(dtype)
        if dtype is not None
        else model.dtype
        if pool is None
        else torch.float32
    )
    if _name(stored) not in DTYPES:
        raise PassError(
            f"Cannot store {_name(stored)}",
            f"a store holds {', '.join(DTYPES)}",
            "Give dtype='float32'.",
        )
    return ExtractSpec(
        tuple(chosen),
        None if pool is None else str(pool),
        stored,
        next(iter(widths)),
        every,
    )


def _of_encoder(
    model: Model, chosen: tuple[Site, ...], patterns: SitePatterns
) -> tuple[Site, ...]:
    """The sites of the encoder: those of the decoder are left out, unless they were
    named as such.
    """
    listed = [patterns] if isinstance(patterns, str | Site) else patterns
    named = any("decoder" in str(pattern) for pattern in listed)
    of_encoder = tuple(site for site in chosen if site.stack != "decoder")
    if len(of_encoder) == len(chosen):
        return chosen
    if named or not of_encoder:
        reason = "the decoder reads targets, and a corpus has none"
        raise PassError(
            f"Cannot extract {chosen[-1]} of {model.name}",
            reason,
            "Name sites such as 'encoder.layer.*'.",
        )
    progress.note(
        f"{model.name}: states of the encoder alone are kept, since a corpus has no"
        " targets for the decoder"
    )
    return of_encoder


def plan_without_corpus(
    model: Model, spec: ExtractSpec, threads: int, unit_limits: Mapping[str, int]
) -> StorePlan:
    """The plan of a store without its corpus."""
    source = model.source(spec.sites[0].stack).to_json() | {
        "class": type(model.module).__name__
    }
    source["device"] = model.device.type  # not which one of several
    return StorePlan(
        model=source,
        tokenizer=tokenizer_identity(model.tokenizer),
        sites=tuple(map(str, spec.sites)),
        widths={str(site): spec.width for site in spec.sites},
        dtype=_name(spec.dtype),
        pool=spec.pool,
        every=spec.every,
        environment=environment(model, threads, unit_limits),
    )


def environment(
    model: Model, threads: int, unit_limits: Mapping[str, int]
) -> dict[str, Any]:
    """What else decides the bits of a state: the machine, its instructions, its
    threads, which texts share a batch.

    `unit_limits` are those of `Engine.unit_limits`; none are of a store that does not
    say how large its units are.
    """
    cuda = model.device.type == "cuda"
    return dict(unit_limits) | {
        "machine": platform.machine(),
        "processor": (
            torch.cuda.get_device_name(model.device)
            if cuda
            else torch.backends.cpu.get_cpu_capability()
        ),
        "threads": threads,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """The class of a tokenizer and a hash of all that it does, whatever it was last
    called with.
    """
    if tokenizer is None:
        return {}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # What comes before the added tokens is how texts were cut and padded in the
        # last call. Parsing takes a second.
        text = str(backend.to_str())
        text = text[max(0, text.find('"added_tokens"')) :]
    else:
        content = {
            "vocabulary": dict(tokenizer.get_vocab()),
            "special": tokenizer.special_tokens_map,
        }
        text = json.dumps(content, sort_keys=True, default=str)
    return {
        "class": type(tokenizer).__name__,
        "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
    }


class Planner:
    """Reads a corpus once, as the sequences of one unit after another; then it knows
    the whole corpus.
    """

    def __init__(
        self,
        model: Model,
        corpus: Corpus,
        spec: ExtractSpec,
        unit_bytes: int = UNIT_BYTES,
        unit_tokens: int | None = None,
    ) -> None:
        self.model, self.corpus, self.spec = model, corpus, spec
        self.window, self.stride = _windows(model, corpus)
        self.identity, self.skips, self.strings = Identity(), Skips(), dict[int, str]()
        self.sequences = self.tokens = 0
        self._source = model.source(spec.sites[0].stack) if spec.pool == "cls" else None
        least = BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cpu"])
        most = (
            MOST_TOKENS if spec.pool else min(MOST_TOKENS, unit_bytes // spec.row_bytes)
        )
        self.unit_tokens = max(most, least if unit_bytes >= UNIT_BYTES else 1)
        limit = _tokens_of_work(model, spec) if unit_tokens is None else unit_tokens
        if limit is not None:
            self.unit_tokens = min(self.unit_tokens, limit)

    def units(
        self, seen: SeenTexts, stored: Sequence[UnitDigest] = ()
    ) -> Iterator[list[StoreSequence]]:
        """The sequences of one unit after another; of a store that is there, each unit
        has as many as it has there.
        """
        waiting: list[StoreSequence] = []
        number = tokens = 0
        for sequence in self._sequences(seen):
            self._check_pool(sequence)
            waiting.append(sequence)
            tokens += len(sequence.ids)
            known = number < len(stored)
            if (
                len(waiting) == stored[number].sequences
                if known
                else tokens >= self.unit_tokens
            ):
                yield self._composed(waiting)
                waiting, tokens, number = [], 0, number + 1
        if waiting:
            yield self._composed(waiting)
        if not self.sequences:
            self.described()  # which refuses an empty corpus

    def described(self) -> dict[str, Any]:
        """The corpus in the plan, once it has been read."""
        return described(
            self.corpus, self.identity, self.skips, self.window, self.stride
        )

    def _check_pool(self, sequence: StoreSequence) -> None:
        """Refuse a text without the token that is to stand for it now, and not when its
        unit is computed.
        """
        if self.spec.pool == "cls":
            check_cls(self._source, [sequence.ids[0]], sequence.text)
        elif self.spec.position is not None:
            position, tokens = self.spec.position, len(sequence.ids)
            if tokens < (position + 1 if position >= 0 else -position):
                windows = self.window is not None and (
                    sequence.start > 0 or tokens == self.window
                )
                where = (
                    f"the window of text {sequence.text:,} from position"
                    f" {sequence.start:,} on"
                    if windows
                    else ""
                )
                reason = f"{where or f'text {sequence.text:,}'} has {tokens:,} tokens"
                remedy = (
                    f"Choose a position that every {'window' if windows else 'text'}"
                    " has; -1 is the last token."
                )
                raise TextError(
                    f"No token at position {position} of every text", reason, remedy
                )

    def _composed(self, sequences: list[StoreSequence]) -> list[StoreSequence]:
        """The sequences of a unit with the batch that each is in, numbered as they run."""
        inputs = Inputs(tuple(sequence.ids for sequence in sequences))
        batch_of: dict[int, int] = {}
        for number, (indices, _) in enumerate(inputs.batches(self.model)):
            batch_of.update(dict.fromkeys(indices, number))
        string = self.model.text_encoder.string
        for token in set(inputs.flat.tolist()) - self.strings.keys():
            self.strings[token] = string(token)
        self.sequences += len(sequences)
        self.tokens += len(inputs.flat)
        return [
            StoreSequence(
                sequence.text,
                sequence.start,
                sequence.ids,
                sequence.spans,
                batch_of[index],
                sequence.string,
            )
            for index, sequence in enumerate(sequences)
        ]

    def _sequences(self, seen: SeenTexts) -> Iterator[StoreSequence]:
        for chunk in self._chunks(seen):
            texts = [text for _, text in chunk]
            # It is alone in its chunk.
            if (
                self.window is not None
                and self.stride is not None
                and _is_long(texts[0])
            ):
                yield from self._cut(*chunk[0], self.window, self.stride)
                continue
            try:
                whole = self.model.text_encoder.encode_whole(texts)
            except TextError as error:
                raise self._named(error, chunk) from None
            for index, (number, text) in enumerate(chunk):
                spans = (
                    ((-1, -1),) * len(whole.ids[index])
                    if whole.spans is None
                    else whole.spans[index]
                )
                if self.window is None or len(whole.ids[index]) <= self.window:
                    yield StoreSequence(number, 0, whole.ids[index], spans, 0, text)
                elif self.stride is not None:
                    yield from self._cut(number, text, self.window, self.stride)
                else:
                    reason = (
                        f"it has {len(whole.ids[index]):,} tokens and {self.model.name}"
                        f" takes {self.window:,}"
                    )
                    remedy = (
                        "Give a stride, as in hs.Corpus(source, stride=256): it is cut"
                        " into windows then."
                    )
                    raise TextError(f"Text {number:,} of the corpus", reason, remedy)

    def _cut(
        self, number: int, text: str, window: int, stride: int
    ) -> Iterator[StoreSequence]:
        """The windows of a long text; a text that fits in one window is that window."""
        try:
            for index, cut in enumerate(
                self.model.text_encoder.windows(text, window, stride)
            ):
                assert cut.spans is not None
                yield StoreSequence(
                    number,
                    index * stride,
                    cut.ids[0],
                    cut.spans[0],
                    0,
                    None if index else text,
                )
        except TextError as error:
            raise self._named(error, [(number, text)]) from None

    def _chunks(self, seen: SeenTexts) -> Iterator[list[tuple[int, str]]]:
        """New texts with their numbers, some at a time."""
        chunk: list[tuple[int, str]] = []
        characters = 0
        with progress.track("Planning") as advance:
            for text in self.corpus.read(self.skips):
                number = self.identity.count
                self.identity.add(text)
                advance(1)
                if seen.first(text, number) != number:
                    continue
                if chunk and _is_long(text):
                    yield chunk
                    chunk, characters = [], 0
                chunk.append((number, text))
                characters += len(text)
                if len(chunk) == CHUNK or characters > CHUNK_CHARACTERS:
                    yield chunk
                    chunk, characters = [], 0
        if chunk:
            yield chunk

    def _named(self, error: TextError, chunk: Sequence[tuple[int, str]]) -> TextError:
        """The error of a text with its number in the corpus, in place of that in its
        chunk.
        """
        problem = error.problem
        with suppress(ValueError, IndexError):
            problem = (
                f"Text {chunk[int(problem.removeprefix('Text '))][0]:,} of the corpus"
            )
        return TextError(problem, error.reason, error.remedy)


def _tokens_of_work(model: Model, spec: ExtractSpec) -> int | None:
    """Return how many tokens of a model are UNIT_WORK; None on a GPU.

    It depends on the model and the sites alone, and not on how fast this machine is:
    the same job has the same units wherever and however often it is planned.
    """
    if model.device.type == "cuda":
        return None
    stack = model.anatomy.stack(spec.sites[0])
    deepest = spec.sites[-1].layer
    blocks = stack.blocks if deepest is None else stack.blocks[:deepest]
    weights = 0
    for block in blocks:
        part = model.module.get_submodule(block.path)
        weights += sum(weight.numel() for weight in part.parameters())
    # Each weight is multiplied and added once for a token.
    return max(LEAST_TOKENS, UNIT_WORK // max(1, 2 * weights))


def _is_long(text: str) -> bool:
    """Whether a text is tokenised by itself."""
    return len(text) > CHUNK_CHARACTERS


def read_corpus(model: Model, corpus: Corpus) -> dict[str, Any]:
    """The corpus as a plan describes it, without the tokenizer: to be compared with the
    plan of a store.
    """
    identity, skips = Identity(), Skips()
    with progress.track("Reading the corpus") as advance:
        for text in corpus.read(skips):
            identity.add(text)
            advance(1)
    return described(corpus, identity, skips, *_windows(model, corpus))


def described(
    corpus: Corpus,
    identity: Identity,
    skips: Skips,
    window: int | None,
    stride: int | None,
) -> dict[str, Any]:
    """What a plan says of a corpus."""
    if not identity.count:
        skipped = (
            f"; {skips.count:,} broken lines were left out, the first: {skips.named[0]}"
            if skips.count
            else ""
        )
        raise TextError(
            "No texts", f"the corpus is empty{skipped}", "Give at least one."
        )
    return {
        "sha256": identity.digest,
        "count": identity.count,
        "window": window,
        "stride": stride,
        "skipped": skips.count,
        "skipped_rows": list(islice(skips.named, 100)),
    }


def _windows(model: Model, corpus: Corpus) -> tuple[int | None, int | None]:
    """The longest sequence in tokens, and how far windows are apart."""
    own = model.text_encoder.window
    window = own if corpus.window is None else corpus.window
    if own is not None and window is not None and window > own:
        raise TextError(
            f"window must be at most {own:,}, got {window:,}",
            f"{model.name} takes no more",
            "Give less.",
        )
    return window, corpus.stride


def differences(stored: StorePlan, asked: StorePlan) -> StoreError | None:
    """The error that names every difference between the plan of a store and the one
    that is asked for.
    """
    named = stored.differences(StorePlan(**{**_fields(asked), **_filled(stored)}))
    if not named:
        return None
    return StoreError(
        "Cannot go on with this store: it was started with other settings",
        "; ".join(named[:20]),
        "Give another folder, or ask for the same as before.",
    )


def _fields(plan: StorePlan) -> dict[str, Any]:
    # Tuples become lists, as they are when read.
    plain = json.loads(json.dumps(asdict(plan)))
    return {**plain, "sites": tuple(plan.sites)}


def _filled(plan: StorePlan) -> dict[str, Any]:
    """What depends on the texts, which the corpus stands for."""
    return {"units": plan.units, "duplicates": plan.duplicates, "strings": plan.strings}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
