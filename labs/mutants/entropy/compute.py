"""The entropy of what every state predicts, as labelled arrays and a report."""

import math
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import NotFinite, SiteError
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.passes.record import make_pass
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results import Result
from hiddenscope.results.dataset import extremes, site_names, to_dataset, token_coords
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import States
from labs.mutants.entropy.story import EntropyReport

# Rows of logits that are held at a time.
ROWS = 512


def measure_entropy(
    model: ModelLike,
    texts: Texts | Inputs,
    sites: SitePatterns,
    draws: int,
    targets: Texts | None,
    seed: int,
) -> Result:
    """Return the entropy of every site and token as a result."""
    model = as_model(model)
    selected, last = select_sites(model, sites)
    inputs = model.encode(texts, targets=targets)
    unembeddings = {site: Unembedding(model, entry(site, last)) for site in selected}
    lengths = inputs.of(last.stack).lengths
    starts = list(accumulate(lengths, initial=0))
    bits = np.empty((len(selected), starts[-1]), dtype=np.float32)
    for numbers, batch in inputs.batches(model):
        states = make_pass(model, batch, selected, keep="device").states
        assert isinstance(states, States), "the sites are in one stack"
        # Batches hold texts of about one length: the columns of each are elsewhere.
        columns = [np.arange(starts[text], starts[text + 1]) for text in numbers]
        for row, site in enumerate(selected):
            measured = entropies(unembeddings[site], states[site])
            bits[row, np.concatenate(columns)] = measured.cpu().numpy()
    if not np.isfinite(bits).all():
        raise NotFinite(
            "Cannot measure the entropy of these predictions",
            "the logits hold a NaN or an infinity",
            "Look at the states.",
        )
    head = Unembedding(model, last)
    noise = random_states(model, draws, model.anatomy.width(last), seed)
    # A tokenizer serves one thread at a time.
    with model.lock:
        tokens = model.text_encoder.tokens(inputs.of(last.stack))
    mean = bits.mean(1, dtype=np.float64)
    extreme = extremes(selected, mean)
    assert extreme is not None, "every entropy is finite"
    report = EntropyReport(
        texts=tokens.count,
        tokens=len(tokens),
        vocabulary=head.vocabulary,
        bits=extreme,
        random_bits=float(entropies(head, noise).mean()),
    )
    attributes = {}
    if tokens.texts is not None:
        attributes["texts" if last.stack is None else "targets"] = list(tokens.texts)
    data = to_dataset(
        {
            "entropy": (
                ("site", "token"),
                bits,
                {"long_name": "entropy", "units": "bits"},
            ),
            "entropy_mean": (
                "site",
                mean,
                {"long_name": "mean entropy", "units": "bits"},
            ),
        },
        {
            "site": site_names(selected),
            **token_coords([tokens], [last.stack] if last.stack else []),
        },
        attributes,
    )
    return Result("entropy", data, report, model.source(last.stack))


def select_sites(model: Model, sites: SitePatterns) -> tuple[tuple[Site, ...], Site]:
    """Return the sites that the head can read, and the last layer of its stack."""
    stack = model.anatomy.stacks[-1]
    name = stack.name if model.encoder_decoder else None
    selected = tuple(site for site in model.anatomy.select(sites) if site.stack == name)
    problem = f"Cannot read a prediction from {sites} of {model.name}"
    for site in selected:
        if site.part:
            raise SiteError(
                problem,
                f"{site} is a part of a block, not a whole state",
                "Ask for layers, such as 'layer.*', or `final`.",
            )
    if not selected:
        raise SiteError(
            problem,
            f"the head reads the {name}, and none is there",
            f"Ask for layers of the {name}, or its `final`.",
        )
    return selected, Site(stack.depth, "", name)


def entry(site: Site, last: Site) -> Site:
    """Return where a state enters the unembedding.

    A layer is read as if it were the last; `final` has gone through the norm.
    """
    return site if site.layer is None else last


def entropies(unembedding: Unembedding, states: Tensor) -> Tensor:
    """Return the entropy in bits of the prediction of each state [row, width]."""
    bits = []
    for rows in states.split(ROWS):
        logits = unembedding.logits(unembedding.head_inputs(rows)).double()
        shares = logits.softmax(1)
        # A word that is never predicted adds nothing: 0 times its logarithm is NaN.
        bits.append(torch.special.entr(shares).sum(1) / math.log(2))
    return torch.cat(bits)


def random_states(model: Model, draws: int, width: int, seed: int) -> Tensor:
    """Return random states [draw, width] in the model's dtype, on its device."""
    generator = np.random.default_rng(seed)
    values = torch.from_numpy(generator.normal(size=(draws, width)))
    return values.to(model.device, model.dtype)
