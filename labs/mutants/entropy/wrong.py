"""Twelve wrong ways to write the analysis, each a few lines of `compute` put otherwise.

>>> sorted(WRONG)[:3]
['batch mixed', 'final missing', 'first token left out']
"""

import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hiddenscope import testing
from labs.mutants import entropy as package

FOLDER = Path(__file__).parent


class Patch(NamedTuple):
    """A text of `compute`, and what stands there in its place."""

    right: str
    wrong: str


# In the order of the issue that asked for them.
WRONG: dict[str, tuple[Patch, ...]] = {
    # `final` is said to be the last layer, and goes through the norm again.
    "norm twice": (
        Patch("blocks(states, site, ROWS)", "blocks(states, head.last, ROWS)"),
    ),
    # Layers are said to be `final`.
    "no norm": (
        Patch("blocks(states, site, ROWS)", "blocks(states, final_of(head), ROWS)"),
        Patch(
            "def random_states(",
            """\
def final_of(head):
    return Site(None, "", head.last.stack)


def random_states(""",
        ),
    ),
    # An encoder-decoder's encoder is first, and nothing tells its states from those
    # that the head reads.
    "wrong stack": (
        Patch(
            "    states = make_pass(model, batch, selected, keep",
            "    states = make_pass(model, *in_first_stack(model, batch, selected), keep",
        ),
        Patch("states[site], site", "states[of_first_stack(model, site)], site"),
        Patch(
            "def entropies(",
            """\
def in_first_stack(model, batch, sites):
    return batch, [of_first_stack(model, site) for site in sites]


def of_first_stack(model, site):
    name = model.anatomy.stacks[0].name if model.encoder_decoder else None
    return Site(site.layer, site.part, name)


def entropies(""",
        ),
    ),
    # `tokenizer(texts, padding=True)`, without a look at its mask.
    "padding counted": (
        Patch(
            "    lengths = inputs.of(",
            """\
    longest = max(inputs.lengths)
    inputs = Inputs(
        tuple(ids + (model.pad,) * (longest - len(ids)) for ids in inputs.ids),
        targets=inputs.targets,
    )
    lengths = inputs.of(""",
        ),
    ),
    # Centred over the tokens of all texts of the batch.
    "batch mixed": (
        Patch(
            "measured = entropies(head, states[site], site)",
            "centred = states[site] - states[site].mean(0)\n"
            "            measured = entropies(head, centred, site)",
        ),
    ),
    "nats called bits": (Patch(".sum(1) / math.log(2)", ".sum(1)"),),
    "first token left out": (
        Patch(
            "    mean = bits.mean(1",
            "    bits, tokens = bits[:, 1:], tokens.select(slice(1, None))\n"
            "    mean = bits.mean(1",
        ),
    ),
    "final missing": (
        Patch(
            "site.stack == stack)", "site.stack == stack and site.layer is not None)"
        ),
    ),
    # Switched on for some experiment, and for everything that the user runs next.
    "gradient left on": (
        Patch(
            "    model = as_model(model)\n",
            "    model = as_model(model)\n    torch.set_grad_enabled(True)\n",
        ),
    ),
    "seed ignored": (Patch("default_rng(seed)", "default_rng()"),),
    # A word that is never predicted has the logarithm of 0, and nobody looks.
    "NaN kept": (
        Patch("torch.special.entr(shares).sum(1)", "-(shares * shares.log()).sum(1)"),
        Patch("if not np.isfinite(bits).all():", "if False:"),
        Patch("extremes(selected, mean)", "extremes(selected, np.nan_to_num(mean))"),
    ),
    # Sorted by their lengths, as batches are, and never put back.
    "texts reordered": (
        Patch(
            "    lengths = inputs.of(",
            """\
    order = sorted(range(len(inputs)), key=lambda text: -inputs.lengths[text])
    inputs = inputs.some(order)
    lengths = inputs.of(""",
        ),
    ),
}


def wrong_entropy(name: str) -> Callable[..., Any]:
    """Return the analysis `entropy` with one of the faults.

    It is declared and called as the right one is, and its result has the same kind.

    >>> wrong_entropy("no norm").description == package.entropy.description
    True
    """
    compute = (FOLDER / "compute.py").read_text("utf-8")
    for patch in WRONG[name]:
        if compute.count(patch.right) != 1:
            raise ValueError(
                f"Cannot write the entropy with {name!r}: compute.py has"
                f" {compute.count(patch.right)} times {patch.right!r}. Mend the patch."
            )
        compute = compute.replace(patch.right, patch.wrong)
    of_compute = f"{package.__name__}.wrong_{name.replace(' ', '_')}"
    sys.modules[of_compute] = _module(of_compute, compute)
    declaration = (FOLDER / "__init__.py").read_text("utf-8")
    right_import = f"from {package.__name__}.compute import"
    declaration = declaration.replace(right_import, f"from {of_compute} import")
    # Under the right package's name: the story beside that one tells the result.
    module = _module(package.__name__, declaration)
    function: Callable[..., Any] = module.entropy
    return function


def _module(name: str, source: str) -> ModuleType:
    """Return a module of a name, made of its source."""
    module: Any = ModuleType(name)
    exec(compile(source, f"<{name}>", "exec"), vars(module))
    return module


def failures(name: str) -> list[str]:
    """Return the laws that a wrong entropy breaks; without a name, the right one."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    analysis = wrong_entropy(name) if name else package.entropy
    try:
        testing.check_analysis(analysis)
    except AssertionError as error:
        # What shows a broken law stands below it, further in.
        _, *listed = re.split(r"\n  (?=\S)", str(error))
        return listed or [str(error)]
    return []
