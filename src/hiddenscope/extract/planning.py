"""Planning: divide a corpus into units of fixed sequences and batches, reading it once.

A sequence is what the model reads: the tokens of a text, or of one window of a long
text.

What a unit holds depends on the texts, the tokenizer and the model's batching alone. A
unit that is computed again, on like hardware, has the same bytes.
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from hiddenscope import progress
from hiddenscope.errors import PassError, TextError
from hiddenscope.extract.corpus import Corpus, Identity, SeenTexts, Skips
from hiddenscope.loading import parse_dtype
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.passes.inputs import BATCH_TOKENS
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states.pool import check_cls
from hiddenscope.states.pooling import Pooling, parse_pooling, requires_cls
from hiddenscope.store import StorePlan, StoreSequence, UnitDigest

# The states of a unit: three times that is held in memory, and lost in a crash.
UNIT_BYTES = 256 * 10**6
MAX_UNIT_TOKENS = 2**17
# Floating-point operations of a unit on a CPU: a minute of a slow one (16 GFLOP/s),
# seconds of a fast one. A GPU does as much in a moment, so there the bytes alone
# decide.
UNIT_WORK = 10**12
# Tokens of a unit that UNIT_WORK closes, at the least: smaller batches are slower.
MIN_UNIT_TOKENS = 256
# Texts that are tokenised at a time.
CHUNK_TEXTS = 256
CHUNK_CHARACTERS = 2**20
DTYPES = ("bfloat16", "float16", "float32")
# Bytes that a store keeps of a token, and of a sequence, besides states, at the most.
TOKEN_BYTES = 48
SEQUENCE_BYTES = 256
# Skipped lines that are named in a plan.
MAX_SKIPPED_ROWS = 100


@dataclass(frozen=True)
class ExtractSpec:
    """What is stored of every text: sites with their widths, pooling, dtype, every n-th
    token.
    """

    sites: tuple[Site, ...]
    pool: str | None
    dtype: torch.dtype
    widths: tuple[int, ...]
    every: int = 1

    @property
    def position(self) -> int | None:
        """Return the position of the token that is pooled, None for another pooling."""
        if self.pool is None:
            return None
        pooling = parse_pooling(self.pool)
        return pooling if isinstance(pooling, int) else None

    @property
    def requires_cls(self) -> bool:
        """Return whether every text must begin with the classification token."""
        return self.pool is not None and requires_cls(parse_pooling(self.pool))

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row, a token's or a pooled one, at all sites."""
        return sum(self.widths) * self.dtype.itemsize

    def bytes(self, sequences: int, tokens: int) -> int:
        """Return the bytes that a store takes, rather too many than too few."""
        if self.pool is not None:
            rows = sequences
        elif self.every == 1:
            rows = tokens
        else:
            # Each sequence may keep one more than its share.
            rows = -(-tokens // self.every) + sequences
        beside = tokens * TOKEN_BYTES + sequences * SEQUENCE_BYTES
        return rows * self.row_bytes + beside


def choose(
    model: Model,
    sites: SitePatterns,
    pool: Pooling | None,
    dtype: str | torch.dtype | None,
    every: int,
) -> ExtractSpec:
    """Check the options against the model, and return what is stored of every text."""
    if pool is not None and every > 1:
        raise PassError(
            f"Cannot use every={every} with pool={pool!r}",
            "a pooled store keeps one vector for each text or window",
            "Give one of the two.",
        )
    selected = model.anatomy.select(sites)
    if not selected:
        raise PassError(
            "No sites to extract",
            "the list is empty",
            "Name at least one, such as 'layer.*'.",
        )
    if model.encoder_decoder:
        selected = _encoder_sites(model, selected, sites)
    stored_dtype = model.dtype
    if dtype is not None:
        stored_dtype = parse_dtype(dtype)
    elif pool is not None:
        stored_dtype = torch.float32
    name = _dtype_name(stored_dtype)
    if name not in DTYPES:
        raise PassError(
            f"Cannot store {name}",
            f"a store holds {', '.join(DTYPES)}",
            "Give dtype='float32'.",
        )
    return ExtractSpec(
        sites=tuple(selected),
        pool=None if pool is None else str(pool),
        dtype=stored_dtype,
        widths=tuple(model.anatomy.width(site) for site in selected),
        every=every,
    )


def _encoder_sites(
    model: Model, selected: tuple[Site, ...], patterns: SitePatterns
) -> tuple[Site, ...]:
    """Return the sites of the encoder; refuse those of the decoder if named."""
    encoder_sites = tuple(site for site in selected if site.stack != "decoder")
    if len(encoder_sites) == len(selected):
        return selected
    if isinstance(patterns, str | Site):
        patterns = [patterns]
    names_decoder = any("decoder" in str(pattern) for pattern in patterns)
    if names_decoder or not encoder_sites:
        raise PassError(
            f"Cannot extract {selected[-1]} of {model.name}",
            "the decoder reads targets, and a corpus has none",
            "Name sites such as 'encoder.layer.*'.",
        )
    progress.note(
        f"{model.name}: states of the encoder alone are kept, since a corpus has no"
        " targets for the decoder"
    )
    return encoder_sites


def plan_without_corpus(
    model: Model, spec: ExtractSpec, threads: int, unit_limits: Mapping[str, int]
) -> StorePlan:
    """Return the plan of a store without its corpus."""
    source = model.source(spec.sites[0].stack).to_json()
    source["class"] = type(model.module).__name__
    # Which one of several GPUs does not matter.
    source["device"] = model.device.type
    return StorePlan(
        model=source,
        tokenizer=tokenizer_identity(model.tokenizer),
        sites=tuple(map(str, spec.sites)),
        widths=dict(zip(map(str, spec.sites), spec.widths, strict=True)),
        dtype=_dtype_name(spec.dtype),
        pool=spec.pool,
        every=spec.every,
        environment=environment(model, threads, unit_limits),
    )


def environment(
    model: Model, threads: int, unit_limits: Mapping[str, int]
) -> dict[str, Any]:
    """Return what else decides the bits of a state: the machine, its instructions, its
    threads, and which texts share a batch.

    `unit_limits` are those of `Engine.unit_limits`. They are empty for a store that
    does not say how large its units are.
    """
    if model.device.type == "cuda":
        processor = torch.cuda.get_device_name(model.device)
    else:
        processor = torch.backends.cpu.get_cpu_capability()
    return dict(unit_limits) | {
        "machine": platform.machine(),
        "processor": processor,
        "threads": threads,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """Return the class of a tokenizer, and a hash of all that it does."""
    if tokenizer is None:
        return {}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # What comes before the added tokens is how texts were truncated and padded in
        # the last call. It is cut off, since parsing the JSON takes a second.
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
    """Reads a corpus once, as the sequences of one unit after another.

    After `units` has ended, `described` tells about the whole corpus.
    """

    def __init__(
        self,
        model: Model,
        corpus: Corpus,
        spec: ExtractSpec,
        unit_bytes: int = UNIT_BYTES,
        unit_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.corpus = corpus
        self.spec = spec
        self.window, self.stride = _windows(model, corpus)
        self.identity = Identity()
        self.skips = Skips()
        self.strings: dict[int, str] = {}
        self.sequences = 0
        self.tokens = 0
        self._source = None
        if spec.requires_cls:
            self._source = model.source(spec.sites[0].stack)
        self.unit_tokens = self._unit_tokens(unit_bytes, unit_tokens)

    def _unit_tokens(self, unit_bytes: int, unit_tokens: int | None) -> int:
        """Return the tokens at which a unit is closed."""
        limit = MAX_UNIT_TOKENS
        if not self.spec.pool:
            limit = min(limit, unit_bytes // self.spec.row_bytes)
        # A whole batch at least, unless the user asked for smaller units.
        batch_tokens = 1
        if unit_bytes >= UNIT_BYTES:
            device = self.model.device.type
            batch_tokens = BATCH_TOKENS.get(device, BATCH_TOKENS["cpu"])
        limit = max(limit, batch_tokens)
        if unit_tokens is None:
            unit_tokens = _tokens_of_work(self.model, self.spec)
        return limit if unit_tokens is None else min(limit, unit_tokens)

    def units(
        self, text_index: SeenTexts, stored: Sequence[UnitDigest] = ()
    ) -> Iterator[list[StoreSequence]]:
        """Yield the sequences of one unit after another.

        Units of an existing store keep the number of their sequences.
        """
        unit: list[StoreSequence] = []
        number = 0
        tokens = 0
        for sequence in self._sequences(text_index):
            self._check_pool(sequence)
            unit.append(sequence)
            tokens += len(sequence.ids)
            if number < len(stored):
                is_full = len(unit) == stored[number].sequences
            else:
                is_full = tokens >= self.unit_tokens
            if is_full:
                yield self._assign_batches(unit)
                unit = []
                tokens = 0
                number += 1
        if unit:
            yield self._assign_batches(unit)
        if not self.sequences:
            # This refuses an empty corpus.
            self.described()

    def described(self) -> dict[str, Any]:
        """Return the corpus as a plan describes it, once it has been read."""
        return _describe(self.identity, self.skips, self.window, self.stride)

    def _check_pool(self, sequence: StoreSequence) -> None:
        """Refuse a text without the pooled token, before its unit is computed."""
        if self.spec.requires_cls:
            check_cls(self._source, [sequence.ids[0]], sequence.text)
        position = self.spec.position
        if position is None:
            return
        tokens = len(sequence.ids)
        if -tokens <= position < tokens:
            return
        piece = "text"
        where = f"text {sequence.text:,}"
        if self.window is not None and (sequence.start > 0 or tokens == self.window):
            piece = "window"
            where = f"the window of {where} from position {sequence.start:,} on"
        raise TextError(
            f"No token at position {position} of every text",
            f"{where} has {tokens:,} tokens",
            f"Choose a position that every {piece} has; -1 is the last token.",
        )

    def _assign_batches(self, sequences: list[StoreSequence]) -> list[StoreSequence]:
        """Return the sequences of a unit, each with the number of its batch."""
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
            replace(sequence, batch=batch_of[index])
            for index, sequence in enumerate(sequences)
        ]

    def _sequences(self, text_index: SeenTexts) -> Iterator[StoreSequence]:
        """Yield the sequences of the corpus, without their batches."""
        for chunk in self._chunks(text_index):
            number, text = chunk[0]
            # A long text has a chunk of its own, and is cut before it is tokenised.
            if _is_long(text) and self.window is not None and self.stride is not None:
                yield from self._cut(number, text, self.window, self.stride)
                continue
            try:
                texts = [text for _, text in chunk]
                encoded = self.model.text_encoder.encode_whole(texts)
            except TextError as error:
                raise self._with_number(error, chunk) from None
            for index, (number, text) in enumerate(chunk):
                ids = encoded.ids[index]
                # Slow tokenizers do not say where in the text a token is.
                spans: tuple[tuple[int, int], ...] = ((-1, -1),) * len(ids)
                if encoded.spans is not None:
                    spans = tuple(encoded.spans[index])
                if self.window is None or len(ids) <= self.window:
                    yield StoreSequence(number, 0, ids, spans, 0, text)
                elif self.stride is not None:
                    yield from self._cut(number, text, self.window, self.stride)
                else:
                    raise TextError(
                        f"Text {number:,} of the corpus",
                        f"it has {len(ids):,} tokens and {self.model.name} takes"
                        f" {self.window:,}",
                        "Give a stride, as in hs.Corpus(source, stride=256): it is cut"
                        " into windows then.",
                    )

    def _cut(
        self, number: int, text: str, window: int, stride: int
    ) -> Iterator[StoreSequence]:
        """Yield the windows of a long text."""
        windows = self.model.text_encoder.windows(text, window, stride)
        try:
            for index, encoded in enumerate(windows):
                assert encoded.spans is not None
                ids, spans = encoded.ids[0], encoded.spans[0]
                # The text is stored once, with its first window.
                string = text if index == 0 else None
                yield StoreSequence(number, index * stride, ids, spans, 0, string)
        except TextError as error:
            raise self._with_number(error, [(number, text)]) from None

    def _chunks(self, text_index: SeenTexts) -> Iterator[list[tuple[int, str]]]:
        """Yield new texts with their numbers, as many as are tokenised at a time."""
        chunk: list[tuple[int, str]] = []
        characters = 0
        with progress.track("Planning") as advance:
            for text in self.corpus.read(self.skips):
                number = self.identity.count
                self.identity.add(text)
                advance(1)
                if text_index.first(text, number) != number:
                    continue
                if chunk and _is_long(text):
                    yield chunk
                    chunk = []
                    characters = 0
                chunk.append((number, text))
                characters += len(text)
                if len(chunk) == CHUNK_TEXTS or characters > CHUNK_CHARACTERS:
                    yield chunk
                    chunk = []
                    characters = 0
        if chunk:
            yield chunk

    def _with_number(
        self, error: TextError, chunk: Sequence[tuple[int, str]]
    ) -> TextError:
        """Return an error that names a text by its number in the corpus."""
        problem = error.problem
        # The text encoder knows the number in the chunk, and says "Text 3".
        with suppress(ValueError, IndexError):
            number, _ = chunk[int(problem.removeprefix("Text "))]
            problem = f"Text {number:,} of the corpus"
        return TextError(problem, error.reason, error.remedy)


def _tokens_of_work(model: Model, spec: ExtractSpec) -> int | None:
    """Return the tokens that take UNIT_WORK operations, or None on a GPU.

    This depends on the model and the sites alone, and not on how fast the machine is:
    a job has the same units wherever and however often it is planned.
    """
    if model.device.type == "cuda":
        return None
    stack = model.anatomy.stack(spec.sites[0])
    deepest = spec.sites[-1].layer
    weights = 0
    for block in stack.blocks[:deepest]:
        module = model.module.get_submodule(block.path)
        weights += sum(weight.numel() for weight in module.parameters())
    # Each weight is multiplied and added once for a token.
    return max(MIN_UNIT_TOKENS, UNIT_WORK // max(1, 2 * weights))


def _is_long(text: str) -> bool:
    """Return whether a text has a chunk of its own."""
    return len(text) > CHUNK_CHARACTERS


def read_corpus(model: Model, corpus: Corpus) -> dict[str, Any]:
    """Return the corpus as a plan describes it, without tokenising its texts."""
    identity = Identity()
    skips = Skips()
    with progress.track("Reading the corpus") as advance:
        for text in corpus.read(skips):
            identity.add(text)
            advance(1)
    window, stride = _windows(model, corpus)
    return _describe(identity, skips, window, stride)


def _describe(
    identity: Identity, skips: Skips, window: int | None, stride: int | None
) -> dict[str, Any]:
    """Return a corpus as a plan describes it; refuse an empty one."""
    if not identity.count:
        reason = "the corpus is empty"
        if skips.count:
            reason += (
                f"; {skips.count:,} broken lines were left out, the first:"
                f" {skips.named[0]}"
            )
        raise TextError("No texts", reason, "Give at least one.")
    return {
        "sha256": identity.digest,
        "count": identity.count,
        "window": window,
        "stride": stride,
        "skipped": skips.count,
        "skipped_rows": skips.named[:MAX_SKIPPED_ROWS],
    }


def _windows(model: Model, corpus: Corpus) -> tuple[int | None, int | None]:
    """Return the longest sequence in tokens, and how far windows are apart."""
    limit = model.text_encoder.window
    if corpus.window is None:
        return limit, corpus.stride
    if limit is not None and corpus.window > limit:
        raise TextError(
            f"window must be at most {limit:,}, got {corpus.window:,}",
            f"{model.name} takes no more",
            "Give less.",
        )
    return corpus.window, corpus.stride


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
