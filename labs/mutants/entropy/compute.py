"""The entropy of what every state predicts, as labelled arrays and a report."""

import math
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import NotFinite
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.passes.record import make_pass
from hiddenscope.passes.unembed import Unembedding, entry_of
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
    selected = select_sites(model, sites)
    inputs = model.encode(texts, targets=targets)
    head = Unembedding(model)
    lengths = inputs.of(head.last.stack).lengths
    starts = list(accumulate(lengths, initial=0))
    bits = np.empty((len(selected), starts[-1]), dtype=np.float32)
    for numbers, batch in inputs.batches(model):
        states = make_pass(model, batch, selected, keep="device").states
        assert isinstance(states, States), "the sites are in one stack"
        # Batches hold texts of about one length: the columns of each are elsewhere.
        columns = [np.arange(starts[text], starts[text + 1]) for text in numbers]
        for row, site in enumerate(selected):
            measured = entropies(head, states[site], site)
            bits[row, np.concatenate(columns)] = measured.cpu().numpy()
    if not np.isfinite(bits).all():
        raise NotFinite(
            "Cannot measure the entropy of these predictions",
            "the logits hold a NaN or an infinity",
            "Look at the states.",
        )
    last = head.last
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
        random_bits=float(entropies(head, noise, last).mean()),
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


def select_sites(model: Model, sites: SitePatterns) -> tuple[Site, ...]:
    """Return the sites that the head can read; refuse any other."""
    selected = model.anatomy.select(sites)
    stack = model.anatomy.sites[-1].stack
    # A pattern without a stack matches those of the encoder too.
    readable = tuple(site for site in selected if site.stack == stack)
    for site in readable or selected:
        entry_of(model.anatomy, site)
    return readable


def entropies(head: Unembedding, states: Tensor, site: Site) -> Tensor:
    """Return the entropy in bits of the prediction of each state [row, width]."""
    bits = []
    for logits in head.blocks(states, site, ROWS):
        shares = logits.double().softmax(1)
        # A word that is never predicted adds nothing: 0 times its logarithm is NaN.
        bits.append(torch.special.entr(shares).sum(1) / math.log(2))
    return torch.cat(bits)


def random_states(model: Model, draws: int, width: int, seed: int) -> Tensor:
    """Return random states [draw, width] in the model's dtype, on its device."""
    generator = np.random.default_rng(seed)
    values = torch.from_numpy(generator.normal(size=(draws, width)))
    return values.to(model.device, model.dtype)
