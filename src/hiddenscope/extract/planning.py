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
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from hiddenscope import progress
from hiddenscope.errors import PassError, TextError
from hiddenscope.extract.corpus import Corpus, SeenTexts, Skips
from hiddenscope.loading import parse_dtype
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.passes.inputs import BATCH_TOKENS
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states.pool import check_cls
from hiddenscope.states.pooling import Pooling, parse_pooling, requires_cls
from hiddenscope.store import StorePlan, StoreSequence, UnitDigest
from hiddenscope.store.plan import DTYPES

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
# Bytes that a store keeps of a token, and of a sequence, besides states, at the most.
TOKEN_BYTES = 48
SEQUENCE_BYTES = 256


def estimated_bytes(plan: StorePlan, sequences: int, tokens: int) -> int:
    """Return the bytes that a store takes, rather too many than too few."""
    if plan.pool is not None:
        rows = sequences
    elif plan.every == 1:
        rows = tokens
    else:
        # Each sequence may keep one more than its share.
        rows = -(-tokens // plan.every) + sequences
    beside = tokens * TOKEN_BYTES + sequences * SEQUENCE_BYTES
    return rows * plan.row_bytes + beside


def plan_without_corpus(
    model: Model,
    sites: SitePatterns,
    pool: Pooling | None,
    dtype: str | torch.dtype | None,
    every: int,
    environment: Mapping[str, int],
) -> StorePlan:
    """Check the options against the model; return the plan without its corpus.

    `environment` has the threads, and the limits of a unit that are known.
    """
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
    encoder_sites = tuple(site for site in selected if site.stack != "decoder")
    if model.encoder_decoder and len(encoder_sites) < len(selected):
        patterns = [sites] if isinstance(sites, str | Site) else sites
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
        selected = encoder_sites
    stored_dtype = model.dtype
    if dtype is not None:
        stored_dtype = parse_dtype(dtype)
    elif pool is not None:
        stored_dtype = torch.float32
    name = str(stored_dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise PassError(
            f"Cannot store {name}",
            f"a store holds {', '.join(DTYPES)}",
            "Give dtype='float32'.",
        )
    source = model.source(selected[0].stack).to_json()
    source["class"] = type(model.module).__name__
    # Which one of several GPUs does not matter.
    source["device"] = model.device.type
    processor = torch.backends.cpu.get_cpu_capability()
    if model.device.type == "cuda":
        processor = torch.cuda.get_device_name(model.device)
    return StorePlan(
        model=source,
        tokenizer=tokenizer_identity(model.tokenizer),
        sites=tuple(map(str, selected)),
        widths={str(site): model.anatomy.width(site) for site in selected},
        dtype=name,
        pool=None if pool is None else str(pool),
        every=every,
        # What else decides the bits of a state: the machine, its instructions, its
        # threads, and which texts share a batch.
        environment={
            **environment,
            "machine": platform.machine(),
            "processor": processor,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
    )


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

    After `units` or `read` has ended, `described` tells about the whole corpus.
    """

    def __init__(self, model: Model, corpus: Corpus, plan: StorePlan) -> None:
        self.model = model
        self.corpus = corpus
        self.plan = plan
        # The longest sequence in tokens, and how far windows are apart.
        self.window = model.text_encoder.window
        self.stride = corpus.stride
        if corpus.window is not None:
            if self.window is not None and corpus.window > self.window:
                raise TextError(
                    f"window must be at most {self.window:,}, got {corpus.window:,}",
                    f"{model.name} takes no more",
                    "Give less.",
                )
            self.window = corpus.window
        self.skips = Skips()
        self.strings: dict[int, str] = {}
        self.texts = 0
        self.sequences = 0
        self.tokens = 0
        self._hash = hashlib.sha256()
        self._sites = tuple(map(Site.parse, plan.sites))
        self._source = model.source(self._sites[0].stack)
        self._pooling = None if plan.pool is None else parse_pooling(plan.pool)
        self.unit_tokens = self._unit_tokens()

    def _unit_tokens(self) -> int:
        """Return the tokens at which a unit is closed."""
        model = self.model
        limits = self.plan.environment
        unit_bytes = limits.get("unit_bytes", UNIT_BYTES)
        limit = MAX_UNIT_TOKENS
        if self._pooling is None:
            limit = min(limit, unit_bytes // self.plan.row_bytes)
        # A whole batch at least, unless the user asked for smaller units.
        batch_tokens = 1
        if unit_bytes >= UNIT_BYTES:
            batch_tokens = BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cpu"])
        limit = max(limit, batch_tokens)
        if "unit_tokens" in limits:
            return min(limit, int(limits["unit_tokens"]))
        if model.device.type == "cuda":
            return limit
        # This depends on the model and the sites alone, and not on how fast the machine
        # is: a job has the same units wherever and however often it is planned.
        weights = 0
        blocks = model.anatomy.stack(self._sites[0]).blocks
        for block in blocks[: self._sites[-1].layer]:
            module = model.module.get_submodule(block.path)
            weights += sum(weight.numel() for weight in module.parameters())
        # Each weight is multiplied and added once for a token.
        tokens = UNIT_WORK // max(1, 2 * weights)
        return min(limit, max(MIN_UNIT_TOKENS, tokens))

    def units(
        self, text_index: SeenTexts, stored: Sequence[UnitDigest] = ()
    ) -> Iterator[list[StoreSequence]]:
        """Yield the sequences of one unit after another.

        Units of an existing store keep the number of their sequences.
        """
        unit = []
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

    def described(self) -> dict[str, Any]:
        """Return the corpus as a plan describes it; refuse an empty one."""
        skips = self.skips
        if not self.texts:
            reason = "the corpus is empty"
            if skips.count:
                reason += (
                    f"; {skips.count:,} broken lines were left out, the first:"
                    f" {skips.named[0]}"
                )
            raise TextError("No texts", reason, "Give at least one.")
        return {
            "sha256": self._hash.hexdigest(),
            "count": self.texts,
            "window": self.window,
            "stride": self.stride,
            "skipped": skips.count,
            "skipped_rows": skips.named,
        }

    def read(self, what: str) -> Iterator[tuple[int, str]]:
        """Yield the texts with their numbers, and take them into the description."""
        with progress.track(what) as advance:
            for text in self.corpus.read(self.skips.add):
                content = text.encode("utf-8")
                # With the lengths, no two corpora have the same bytes.
                self._hash.update(len(content).to_bytes(8, "little"))
                self._hash.update(content)
                self.texts += 1
                advance(1)
                yield self.texts - 1, text

    def _check_pool(self, sequence: StoreSequence) -> None:
        """Refuse a text without the pooled token, before its unit is computed."""
        pooling = self._pooling
        if pooling is None:
            return
        if requires_cls(pooling):
            check_cls(self._source, [sequence.ids[0]], sequence.text)
        tokens = len(sequence.ids)
        if not isinstance(pooling, int) or -tokens <= pooling < tokens:
            return
        piece = "text"
        where = f"text {sequence.text:,}"
        if self.window is not None and (sequence.start > 0 or tokens == self.window):
            piece = "window"
            where = f"the window of {where} from position {sequence.start:,} on"
        raise TextError(
            f"No token at position {pooling} of every text",
            f"{where} has {tokens:,} tokens",
            f"Choose a position that every {piece} has; -1 is the last token.",
        )

    def _assign_batches(self, sequences: list[StoreSequence]) -> list[StoreSequence]:
        """Return the sequences of a unit, each with the number of its batch."""
        inputs = Inputs(tuple(sequence.ids for sequence in sequences))
        batched = list(sequences)
        for number, (indices, _) in enumerate(inputs.batches(self.model)):
            for index in indices:
                batched[index] = replace(sequences[index], batch=number)
        string = self.model.text_encoder.string
        for token in set(inputs.flat.tolist()) - self.strings.keys():
            self.strings[token] = string(token)
        self.sequences += len(sequences)
        self.tokens += len(inputs.flat)
        return batched

    def _sequences(self, text_index: SeenTexts) -> Iterator[StoreSequence]:
        """Yield the sequences of the corpus, without their batches."""
        for chunk in self._chunks(text_index):
            number, text = chunk[0]
            # A long text has a chunk of its own, and is cut before it is tokenised.
            if len(text) > CHUNK_CHARACTERS and self.window and self.stride:
                yield from self._cut(number, text)
                continue
            with _numbered([number for number, _ in chunk]):
                texts = [text for _, text in chunk]
                encoded = self.model.text_encoder.encode_whole(texts)
            for index, (number, text) in enumerate(chunk):
                ids = encoded.ids[index]
                # Slow tokenizers do not say where in the text a token is.
                spans = ((-1, -1),) * len(ids)
                if encoded.spans is not None:
                    spans = tuple(encoded.spans[index])
                if self.window is None or len(ids) <= self.window:
                    yield StoreSequence(number, 0, ids, spans, 0, text)
                elif self.stride is not None:
                    yield from self._cut(number, text)
                else:
                    raise TextError(
                        f"Text {number:,} of the corpus",
                        f"it has {len(ids):,} tokens and {self.model.name} takes"
                        f" {self.window:,}",
                        "Give a stride, as in hs.Corpus(source, stride=256): it is cut"
                        " into windows then.",
                    )

    def _cut(self, number: int, text: str) -> Iterator[StoreSequence]:
        """Yield the windows of a long text."""
        window, stride = self.window, self.stride
        assert window is not None
        assert stride is not None
        with _numbered([number]):
            windows = self.model.text_encoder.windows(text, window, stride)
            for index, encoded in enumerate(windows):
                assert encoded.spans is not None
                ids, spans = encoded.ids[0], encoded.spans[0]
                # The text is stored once, with its first window.
                string = text if index == 0 else None
                yield StoreSequence(number, index * stride, ids, spans, 0, string)

    def _chunks(self, text_index: SeenTexts) -> Iterator[list[tuple[int, str]]]:
        """Yield new texts with their numbers, as many as are tokenised at a time.

        A text that is longer than all of a chunk may be has one of its own.
        """
        chunk: list[tuple[int, str]] = []
        characters = 0
        for number, text in self.read("Planning"):
            if text_index.first(text, number) != number:
                continue
            characters += len(text)
            is_full = len(chunk) == CHUNK_TEXTS or characters > CHUNK_CHARACTERS
            if chunk and is_full:
                yield chunk
                chunk = []
                characters = len(text)
            chunk.append((number, text))
        if chunk:
            yield chunk


@contextmanager
def _numbered(numbers: Sequence[int]) -> Iterator[None]:
    """Name a text that cannot be encoded by its number in the corpus."""
    try:
        yield
    except TextError as error:
        problem = error.problem
        # The text encoder knows the number in the chunk, and says "Text 3".
        with suppress(ValueError, IndexError):
            number = numbers[int(problem.removeprefix("Text "))]
            problem = f"Text {number:,} of the corpus"
        raise TextError(problem, error.reason, error.remedy) from None
