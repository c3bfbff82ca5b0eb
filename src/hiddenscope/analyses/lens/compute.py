"""The numbers of a lens: what every layer predicts, as labelled arrays and a report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from hiddenscope import progress
from hiddenscope.analyses.lens.fitted import Lens, resolve
from hiddenscope.analyses.lens.fitting import mapped
from hiddenscope.analyses.lens.reading import LensSites, Reading, read_predictions
from hiddenscope.analyses.lens.story import (
    Accuracy,
    LastToken,
    LensReport,
    LogitRecipe,
    MedianRank,
    TargetRank,
)
from hiddenscope.directions.direction import Direction
from hiddenscope.errors import PassError, SiteError, TextError
from hiddenscope.files import PathLike
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts, require_recordable
from hiddenscope.passes.record import make_pass
from hiddenscope.passes.text_encoder import notes_on_spaces
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Dims,
    Variables,
    site_names,
    text_array,
    to_dataset,
    token_coords,
)
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Source, States, Tokens
from hiddenscope.states.arrays import AnyArray, Bools, Floats32, Ints
from hiddenscope.states.mixed import one_tensor, take_sites

if TYPE_CHECKING:
    import xarray

NEXT = "next"
# Tokens whose states are held at a time, of up to this many sites; fewer of more sites.
BATCH_TOKENS = 2_048
BATCH_SITES = 128

_Columns: TypeAlias = dict[str, tuple[Dims, AnyArray]]

CELLS = ("site", "token")
RANKED = ("site", "token", "rank")

ATTRIBUTES: dict[str, Attributes] = {
    "word": {"long_name": "top tokens"},
    "probability": {"long_name": "probability of the top tokens"},
    "word_id": {"long_name": "ids of the top tokens"},
    "entropy": {"long_name": "entropy", "units": "nats"},
    "kl": {
        "long_name": "KL divergence from the model's own prediction",
        "units": "nats",
        "scale": "log",
    },
    "target_probability": {"long_name": "probability of {target}", "scale": "log"},
    "target_rank": {"long_name": "rank of {target}", "scale": "log"},
    "agreement": {"long_name": "top token is the model's own prediction"},
    "accuracy": {"long_name": "top token is the true next token"},
    "settled_share": {
        "long_name": "settled: top token is the model's own prediction from here on"
    },
    "kl_mean": {
        "long_name": "mean KL divergence from the model's own prediction",
        "units": "nats",
        "scale": "log",
    },
    "settled": {
        "long_name": "layer from which on the top token is the model's own prediction"
    },
}


@dataclass(frozen=True)
class Target:
    """The word whose probability is followed.

    `id` is None where each token has a target of its own, the next token.
    """

    name: str
    id: int | None


def read_layers(
    model: ModelLike,
    texts: Texts | Inputs | Direction,
    k: int,
    target: str | int | None,
    lens: PathLike | Lens,
    sites: SitePatterns,
    targets: Texts | None,
) -> Result:
    """Return the readings of all sites and tokens as a result."""
    model = as_model(model)
    if isinstance(texts, Direction):
        sites = _sites_of(texts, target, targets)
    selected = LensSites.of(model, sites)
    fitted = resolve(model, lens)
    if fitted is not None and selected.parts:
        raise SiteError(
            f"Cannot read {selected.parts[0]} with the {fitted.kind} lens",
            "it was fitted to whole layers",
            "Ask for whole layers, or use lens='logit'.",
        )
    unembedding = Unembedding(model)
    if k > unembedding.vocabulary:
        raise PassError(
            f"Cannot name the top {k:,} tokens",
            f"the vocabulary of {model.name} has {unembedding.vocabulary:,} tokens",
            "Give a smaller k.",
        )
    if isinstance(texts, Direction):
        return _read_direction(model, texts, selected, unembedding, fitted, k)
    inputs = model.encode(texts, targets=targets)
    followed = _target(model, target, selected, inputs)
    reading, source = _read_batches(
        model, inputs, selected, unembedding, fitted, followed, k
    )
    # A tokenizer serves one thread at a time.
    with model.lock:
        encoder = model.text_encoder
        tokens = encoder.tokens(inputs.of(selected.last.stack))
        predictions = Predictions.of(reading, selected, tokens)
        data = lens_dataset(predictions, encoder.strings, followed)
        answer_id = int(predictions.answer[-1])
        answer = encoder.string(answer_id)
        spelled = () if target == NEXT else (target,)
        notes = [*notes_on_spaces(model.tokenizer, spelled)]
    recipe = unembedding.recipe
    if recipe.reason:
        notes.append(f"The logits were made by whole passes, because {recipe.reason}.")
    last_token = None
    if tokens.count == 1:
        settled = predictions.stays[:, -1] & predictions.known
        last_token = LastToken(
            token=tokens.strings[-1],
            answer=_word(answer_id, answer),
            answer_id=answer_id,
            probability=float(predictions.answer_probability[-1]),
            settled_from=predictions.first(settled),
        )
    accuracy = None
    if "accuracy" in data and predictions.whole.any():
        whole = data["accuracy"].isel(site=predictions.whole)
        names, shares = whole["site"].values.tolist(), whole.to_numpy()
        accuracy = Accuracy(
            tokens=int((next_ids(tokens) >= 0).sum()),
            site=names[-1],
            value=float(shares[-1]),
            half_from=half_from(names, shares),
        )
    report = LensReport(
        lens="logit" if fitted is None else fitted.kind,
        texts=tokens.count,
        tokens=len(tokens),
        causal=predictions.causal,
        parts=not predictions.whole.all(),
        settled_known_from=predictions.first(predictions.known),
        half_settled_from=predictions.first(
            predictions.known & (predictions.stays.mean(1) >= 0.5)
        ),
        last_token=last_token,
        accuracy=accuracy,
        target=_target_rank(predictions, data, followed),
        unembedding=LogitRecipe(
            vocabulary=recipe.vocabulary,
            method=recipe.method,
            transform=recipe.transform,
            constant=None if recipe.transform == "none" else recipe.constant,
        ),
        notes=notes,
    )
    return Result("lens", data, report, source)


def _read_direction(
    model: Model,
    direction: Direction,
    sites: LensSites,
    unembedding: Unembedding,
    fitted: Lens | None,
    k: int,
) -> Result:
    """Return what a direction and its opposite predict, each as a state by itself."""
    parts = []
    for site in sites.selected:
        vector = direction.vector_at(site, model.anatomy.width(site))
        rows = torch.stack([vector, -vector])[None].to(model.device, model.dtype)
        if fitted is not None:
            rows = mapped(rows, [site], fitted.maps)
        parts.append((rows, site))
    reading = read_predictions(unembedding, parts, 0, k=k)
    with model.lock:
        columns = _word_columns(reading, model.text_encoder.strings)
    variables = {name: (*columns[name], ATTRIBUTES[name]) for name in columns}
    coords: Coordinates = {
        "site": site_names(sites.selected),
        "rank": np.arange(1, k + 1),
        "string": ("token", text_array(["along it", "against it"])),
    }
    report = LensReport(
        lens="logit" if fitted is None else fitted.kind,
        texts=0,
        tokens=0,
        causal=sites.causal,
        settled_known_from=None,
        half_settled_from=None,
        notes=[],
        direction=direction.title,
    )
    data = to_dataset(variables, coords)
    return Result("lens", data, report, model.source(sites.last.stack))


def _read_batches(
    model: Model,
    inputs: Inputs,
    sites: LensSites,
    unembedding: Unembedding,
    fitted: Lens | None,
    target: Target | None,
    k: int,
) -> tuple[Reading, Source]:
    """Read every text, batch by batch, and put the tokens back into their order."""
    require_recordable(model.module)
    readings = []
    rows = []
    source = None
    starts = list(accumulate(inputs.of(sites.last.stack).lengths, initial=0))
    most_sites = max(BATCH_SITES, len(sites.all))
    batch_tokens = max(1, BATCH_TOKENS * BATCH_SITES // most_sites)
    with progress.track("Reading", total=starts[-1] * len(sites.all)) as advance:
        for texts, batch in inputs.batches(model, batch_tokens=batch_tokens):
            # On a GPU the states never go through host memory.
            states = make_pass(model, batch, sites.all, keep="device").states
            assert isinstance(states, States), "the sites are in one stack"
            count = len(sites.entering)
            entering = one_tensor(take_sites(states.values, np.arange(count)))
            if fitted is not None:
                entering = mapped(entering, sites.entering, fitted.maps)
            parts = [(entering, sites.last)]
            if sites.final is not None:
                parts.append((states[sites.final][None], sites.final))
            ids = None
            if target is not None and target.id is None:
                ids = next_ids(states.tokens)
            elif target is not None:
                ids = np.full(len(states.tokens), target.id, dtype=np.int64)
            readings.append(
                read_predictions(
                    unembedding, parts, count - 1, k=k, targets=ids, advance=advance
                )
            )
            places = [np.arange(starts[text], starts[text + 1]) for text in texts]
            rows.append(np.concatenate(places))
            source = states.source
    assert source is not None, "there is at least one batch"
    return Reading.join(readings, rows), source


def _sites_of(direction: Direction, *targets: Any) -> SitePatterns:
    """Return where a direction is read, alone: no target can be followed."""
    if any(target is not None for target in targets):
        problem = "Cannot follow a target along a direction"
        raise TextError(problem, "it is read alone, without a text", "Leave it out.")
    return direction.sites or tuple(filter(None, direction.vectors)) or "layer.-1"


def _target(
    model: Model, target: str | int | None, sites: LensSites, inputs: Inputs
) -> Target | None:
    """Return the word to follow; refuse one that is not a single token."""
    if target is None:
        return None
    if target != NEXT:
        with model.lock:
            token = model.text_encoder.single(target)
            return Target(repr(model.text_encoder.string(token)), token)
    if not sites.causal:
        reason = (
            f"{model.name} sees the whole text and does not predict what comes next"
        )
        raise TextError(
            "Cannot track the next token", reason, "Give a token as the target."
        )
    for text, length in enumerate(inputs.of(sites.last.stack).lengths):
        if length < 2:
            raise TextError(
                f"Text {text} has no next token",
                "it is one token long",
                "Give a longer one.",
            )
    return Target("the next token", None)


@dataclass(frozen=True)
class Predictions:
    """The reading of the selected sites, and the model's own `answer` after each token.

    `stays` [site, token]: the top token of this site, and of every site above it that
    was read, is the answer. `known` [site]: no layer above was left out, so that an
    answer that stays is settled there. `settled` [token]: the lowest such layer, or -1.
    """

    reading: Reading
    sites: tuple[Site, ...]
    tokens: Tokens
    answer: Ints
    answer_probability: Floats32
    stays: Bools
    known: Bools
    settled: Ints
    causal: bool

    @classmethod
    def of(cls, reading: Reading, sites: LensSites, tokens: Tokens) -> "Predictions":
        """Draw the predictions from a reading of all sites, the last layer included."""
        last = len(sites.entering) - 1
        depth = sites.last.layer or 0
        rows = [sites.all.index(site) for site in sites.selected]
        answer = reading.top_ids[last, :, 0]
        # A part does not hold what the layers below it predict, so that only whole
        # layers can be settled.
        stream = [row for row, site in enumerate(sites.all) if not site.part]
        agrees = reading.predicts(answer)
        stays = np.zeros_like(agrees)
        stays[stream] = stays_from(agrees[stream])
        # Where every layer of the stack above was read. `final` comes after them all.
        read = {site.layer for site in sites.layers}
        layers, known = [], []
        for site in sites.selected:
            layer = depth if site.layer is None else site.layer
            layers.append(layer)
            known.append(not site.part and read.issuperset(range(layer, depth + 1)))
        is_settled = stays[rows] & np.array(known)[:, None]
        by_site = np.where(is_settled, np.array(layers)[:, None], depth + 1)
        settled = by_site.min(0)
        settled[settled > depth] = -1
        return cls(
            reading=reading.at(rows),
            sites=sites.selected,
            tokens=tokens,
            answer=answer,
            answer_probability=reading.probability[last, :, 0],
            stays=stays[rows],
            known=np.array(known),
            settled=settled,
            causal=sites.causal,
        )

    @property
    def whole(self) -> Bools:
        """Tell which sites are whole layers or `final`."""
        return np.array([not site.part for site in self.sites])

    def first(self, where: Bools) -> str | None:
        """Return the first site at which a condition holds."""
        return str(self.sites[int(np.argmax(where))]) if where.any() else None


def next_ids(tokens: Tokens) -> Ints:
    """Return the token after each token in its text, -1 after the last of a text."""
    following = np.append(tokens.ids[1:], -1)
    same_text = np.append(tokens.text[1:] == tokens.text[:-1], False)
    return np.where(same_text, following, -1)


def stays_from(same: Bools) -> Bools:
    """Tell for each row whether it and all rows after it are true."""
    return np.logical_and.accumulate(same[::-1])[::-1]


def lens_dataset(
    predictions: Predictions,
    strings: Callable[[list[int]], list[str]],
    target: Target | None,
) -> "xarray.Dataset":
    """Return the predictions as one Dataset; `strings` decodes ids."""
    reading = predictions.reading
    columns = _word_columns(reading, strings)
    columns["kl"] = CELLS, reading.kl
    target_name = ""
    if target is not None:
        target_name = target.name
        ranks = np.where(reading.target_rank > 0, reading.target_rank, np.nan)
        probability = np.exp(reading.target_log_probability)
        columns["target_probability"] = CELLS, probability
        columns["target_rank"] = CELLS, ranks.astype(np.float32)
    # Shares and means over all tokens, and where each answer is settled.
    agreement = reading.predicts(predictions.answer).mean(1)
    columns["agreement"] = "site", agreement.astype(np.float32)
    columns["kl_mean"] = "site", reading.kl.mean(1)
    if predictions.known.any():
        share = np.where(predictions.known, predictions.stays.mean(1), np.nan)
        columns["settled_share"] = "site", share.astype(np.float32)
        columns["settled"] = "token", predictions.settled
    following = next_ids(predictions.tokens)
    followed = following >= 0
    if predictions.causal and followed.any():
        correct = reading.predicts(following)[:, followed]
        columns["accuracy"] = "site", correct.mean(1).astype(np.float32)
    variables: Variables = {}
    for name, (dims, values) in columns.items():
        attributes = ATTRIBUTES[name].copy()
        attributes["long_name"] = attributes["long_name"].format(target=target_name)
        variables[name] = dims, values, attributes
    tokens = predictions.tokens
    stack = predictions.sites[0].stack
    coords: Coordinates = {
        "site": site_names(predictions.sites),
        "rank": np.arange(1, reading.top_ids.shape[2] + 1),
        **token_coords([tokens], [] if stack is None else [stack]),
    }
    attrs = {}
    if tokens.texts is not None:
        attrs["texts" if stack is None else "targets"] = list(tokens.texts)
    return to_dataset(variables, coords, attrs)


def _word_columns(
    reading: Reading, strings: Callable[[list[int]], list[str]]
) -> _Columns:
    """Return the top words of a reading; each distinct id is decoded once."""
    distinct, places = np.unique(reading.top_ids, return_inverse=True)
    ids = distinct.tolist()
    words = text_array(list(map(_word, ids, strings(ids))))
    return {
        "word": (RANKED, words[places.reshape(reading.top_ids.shape)]),
        "probability": (RANKED, reading.probability),
        "word_id": (RANKED, reading.top_ids),
        "entropy": (CELLS, reading.entropy),
    }


def _word(token: int, string: str) -> str:
    """Return a word as it is shown, also where the tokenizer has no text for it."""
    return string or f"(id {token})"


def _target_rank(
    predictions: Predictions, data: "xarray.Dataset", target: Target | None
) -> TargetRank | MedianRank | None:
    """Return where the target ranks: after the last token of one text, or overall."""
    if target is None:
        return None
    rank = data["target_rank"].to_numpy()
    last_site = str(predictions.sites[-1])
    if predictions.tokens.count > 1 or not np.isfinite(rank[:, -1]).all():
        counted = np.isfinite(rank[-1])
        return MedianRank(
            token=target.name,
            id=target.id,
            site=last_site,
            tokens=int(counted.sum()),
            median_rank=float(np.median(rank[-1][counted])),
        )
    k = data.sizes["rank"]
    reading = predictions.reading
    tied = reading.tied[:, -1]
    # Where more than k words are alike, none is among the top k.
    tied_beyond = tied & (np.exp(reading.entropy[:, -1]) > k + 0.5)
    # Parts do not come one after another as layers do: for them nothing is the first.
    whole = predictions.whole
    last = data["target_probability"].to_numpy()[:, -1]
    in_top_k = whole & (rank[:, -1] <= k) & ~tied_beyond
    return TargetRank(
        token=target.name,
        id=target.id,
        site=last_site,
        rank=int(rank[-1, -1]),
        probability=float(last[-1]),
        first_best_at=predictions.first(whole & (rank[:, -1] == 1) & ~tied),
        first_in_top_k_at=predictions.first(in_top_k),
        k=k,
        most_probable_at=predictions.first((last == last.max()) & ~tied_beyond),
        highest_probability=float(last.max()),
    )


def half_from(sites: Sequence[str], accuracy: Floats32) -> str | None:
    """Return the lowest site from which on accuracy stays at half the last site's.

    It is None where the accuracy at the last site is 0.

    >>> half_from(["layer.0", "layer.1", "layer.2"], np.array([0.6, 0.1, 1.0]))
    'layer.2'
    """
    if accuracy[-1] == 0:
        return None
    stays = stays_from(accuracy >= accuracy[-1] / 2)
    return sites[int(np.argmax(stays))]
