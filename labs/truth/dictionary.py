"""Does Dictionary.fit find directions that are known?

python -m labs.truth.dictionary             both tables
python -m labs.truth.dictionary compiled    one of them
python -m labs.truth.dictionary --write     and write dictionary.md, which keeps the other
python -m labs.truth.dictionary --quick     a few rows

States are drawn as sparse combinations of known directions, or are those of compiled
models, whose compiler knows the direction of every value of every variable. Beside the
dictionary stand PCA, ICA (scikit-learn's FastICA) and directions drawn at random.

The cosine is that of each true direction with the nearest learned one, whichever its
sign, on average; "found" is the share of those above 0.9. The F1 is that of "this direction acts in this state", told by the learned one that
tells it best; of what has no threshold, the k largest by size act in a state. Learned
directions are judged on states that they were not learned from.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from sklearn.decomposition import PCA, FastICA
from torch import Tensor
from torch.nn.functional import normalize

import hiddenscope as hs
from labs.truth.hosts import compile_into
from labs.truth.programs import PROGRAMS

TITLE = "# Directions that are known, and what learns them"
TABLES = Path(__file__).with_name("dictionary.md")
ROWS = 20_000
# Width, true directions, how many act in a state, and noise for one of the signal.
DRAWN = (
    (64, 32, 3, 0.05),
    (64, 128, 3, 0.05),
    (64, 128, 3, 0.3),
    (64, 128, 3, 1.0),
    (64, 128, 8, 0.05),
    (64, 512, 3, 0.05),
    (128, 256, 3, 0.05),
)
HOST = "gpt2"
INPUTS = 2_000
# A direction that acts in fewer states, or in nearly all, cannot be judged.
RARE = 0.005
TRAINING = hs.Training(tokens=400_000, batch=512, rate=3e-3)


@dataclass(frozen=True)
class Known:
    """States with the directions that they are made of, and which act in which."""

    states: Tensor
    directions: Tensor
    acts: Tensor
    k: int

    @property
    def parts(self) -> tuple[Known, Known]:
        """Return states to learn from, and others to be judged on."""
        cut = len(self.states) - max(1, len(self.states) // 10)
        learned = Known(self.states[:cut], self.directions, self.acts[:cut], self.k)
        rest = Known(self.states[cut:], self.directions, self.acts[cut:], self.k)
        return learned, rest


@dataclass(frozen=True)
class Scores:
    """How near each true direction is to a learned one, and how well it is told."""

    cosine: float
    found: float
    f1: float


Learned: TypeAlias = tuple[Tensor, Callable[[Tensor], Tensor]]
"""Unit directions [feature, width], and which of them act in states."""


def drawn(
    width: int, features: int, active: int, noise: float, seed: int, rows: int = ROWS
) -> Known:
    """Draw states as sparse combinations of random directions."""
    generator = torch.Generator().manual_seed(seed)
    directions = normalize(torch.randn(features, width, generator=generator))
    rate = active / features
    acts = torch.rand(rows, features, generator=generator) < rate
    signal = (
        acts * (0.5 + torch.rand(rows, features, generator=generator))
    ) @ directions
    size = (signal - signal.mean(0)).square().mean().sqrt()
    errors = torch.randn(rows, width, generator=generator)
    mean = torch.randn(width, generator=generator)
    return Known(signal + noise * size * errors + mean, directions, acts, active)


def compiled(program: str, host: str) -> Known:
    """Take the states of a compiled model after its last block, without first tokens."""
    known = compile_into(host, PROGRAMS[program]())
    assert known.compiled is not None
    inputs = [known.ids(tokens) for tokens in known.program.draw(INPUTS)]
    captured = known.model.capture(inputs, f"layer.{known.circuit.blocks}")
    assert isinstance(captured, hs.States)
    states = captured.values[0][torch.from_numpy(captured.tokens.positions > 0)].float()
    channels = known.compiled.decoded(states)
    acts = channels.abs() > 0.5 / len(PROGRAMS)
    share = acts.double().mean(0)
    varied = (share > RARE) & (share < 1 - RARE)
    every = known.compiled.writing(np.eye(known.compiled.channels.count)).T
    k = max(1, round(float(acts[:, varied].double().sum(1).mean())))
    return Known(states, normalize(every[varied]), acts[:, varied], k)


def by_fit(known: Known, prefixes: bool, seed: int) -> Learned:
    """Train a dictionary with half as many directions again as there are."""
    features = max(8, round(1.5 * len(known.directions)))
    ends = (features // 8, features // 2) if prefixes else ()
    training = hs.Training(
        TRAINING.tokens, TRAINING.batch, ends, TRAINING.rate, seed=seed
    )
    count = len(known.states)
    places = np.arange(1, count + 1)
    tokens = hs.Tokens(None, places * 0, places, places, ("",) * count)
    states = hs.States((hs.Site(1),), known.states[None], tokens, hs.Source("known"))
    fitted = hs.Dictionary.fit(states, features=features, k=known.k, training=training)
    return fitted.directions, lambda rows: fitted.activations(rows) > 0


def by_components(known: Known, kind: str, seed: int) -> Learned:
    """Take principal or independent components, as many as there can be."""
    rows = known.states.double().numpy()
    rank = int(np.linalg.matrix_rank(rows - rows.mean(0), tol=1e-3 * len(rows) ** 0.5))
    count = min(rank, len(known.directions))
    if kind == "PCA":
        fitted = PCA(count, random_state=seed).fit(rows)
        directions = fitted.components_
    else:
        fitted = FastICA(count, random_state=seed, max_iter=200, tol=1e-3)
        with warnings.catch_warnings():
            # What has not converged is scored as it is.
            warnings.simplefilter("ignore")
            fitted.fit(rows)
        directions = fitted.mixing_.T

    def acts(states: Tensor) -> Tensor:
        scores = torch.from_numpy(fitted.transform(states.double().numpy()))
        return _largest(scores / scores.std(0).clamp_min(1e-9), known.k)

    return normalize(torch.from_numpy(directions).float()), acts


def by_chance(known: Known, seed: int) -> Learned:
    """Draw as many directions at random."""
    generator = torch.Generator().manual_seed(1000 + seed)
    shape = max(8, round(1.5 * len(known.directions))), known.states.shape[1]
    directions = normalize(torch.randn(shape, generator=generator))
    mean = known.states.mean(0)
    return directions, lambda rows: _largest((rows - mean) @ directions.T, known.k)


def _largest(scores: Tensor, k: int) -> Tensor:
    sizes = scores.abs()
    least = sizes.topk(min(k, sizes.shape[1])).values[:, -1:]
    return sizes >= least


WAYS: dict[str, Callable[[Known, int], Learned]] = {
    "BatchTopK": lambda known, seed: by_fit(known, False, seed),
    "Matryoshka": lambda known, seed: by_fit(known, True, seed),
    "PCA": lambda known, seed: by_components(known, "PCA", seed),
    "ICA": lambda known, seed: by_components(known, "ICA", seed),
    "random": by_chance,
}


def scored(known: Known, way: Callable[[Known, int], Learned], seed: int) -> Scores:
    """Learn directions from most states, and judge them on the rest."""
    learned, rest = known.parts
    directions, acts = way(learned, seed)
    cosines = (known.directions @ directions.T).abs().max(1).values
    told = acts(rest.states).double()
    truth = rest.acts.double()
    both = truth.T @ told
    f1 = 2 * both / (truth.sum(0)[:, None] + told.sum(0)).clamp_min(1)
    # What acts in none of these states cannot be told.
    best = f1.max(1).values[truth.sum(0) > 0]
    found = (cosines > 0.9).double().mean()
    return Scores(float(cosines.mean()), float(found), float(best.mean()))


def drawn_rows(quick: bool) -> Iterator[str]:
    """Yield the scores on states that were drawn, as rows of a table."""
    yield from _header(["width", "directions", "act", "noise"])
    for width, features, active, noise in DRAWN[: 2 if quick else None]:
        cells = [str(width), str(features), str(active), f"{noise:g}"]
        yield _row(cells, drawn(width, features, active, noise, seed=0))


def compiled_rows(quick: bool) -> Iterator[str]:
    """Yield the scores on states of compiled models."""
    yield from _header(["program", "width", "directions", "act"])
    for program in list(PROGRAMS)[: 2 if quick else None]:
        known = compiled(program, HOST)
        count, width = known.directions.shape
        yield _row([program, str(width), str(count), str(known.k)], known)


PARTS: dict[str, tuple[str, Callable[[bool], Iterator[str]]]] = {
    "drawn": ("Sparse combinations that were drawn", drawn_rows),
    "compiled": ("States of programs compiled into GPT-2", compiled_rows),
}


def _header(cells: Sequence[str]) -> Iterator[str]:
    columns = [*cells, *(f"{name}: cosine, found, F1" for name in WAYS)]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"


def _row(cells: Sequence[str], known: Known) -> str:
    shown = list(cells)
    for way in WAYS.values():
        scores = scored(known, way, seed=0)
        shown.append(f"{scores.cosine:.2f}, {scores.found:.2f}, {scores.f1:.2f}")
    return f"| {' | '.join(shown)} |"


def main() -> None:
    """Print the tables as they are known, and write them if asked to."""
    parser = argparse.ArgumentParser(prog="python -m labs.truth.dictionary")
    parser.add_argument("parts", nargs="*", default=list(PARTS), help="drawn, compiled")
    parser.add_argument("--write", action="store_true", help="write dictionary.md")
    parser.add_argument("--quick", action="store_true", help="a few rows")
    options = parser.parse_args()
    sections = written()
    for part in options.parts:
        title, rows = PARTS[part]
        lines = []
        for line in rows(options.quick):
            print(line, flush=True)
            lines.append(line)
        sections[title] = "\n".join(lines)
        if options.write:
            texts = [f"## {title}\n\n{table}\n" for title, table in sections.items()]
            TABLES.write_text("\n".join([f"{TITLE}\n", *texts]), "utf-8")


def written() -> dict[str, str]:
    """Return the tables of the file, by their titles."""
    if not TABLES.exists():
        return {}
    sections = {}
    for section in TABLES.read_text("utf-8").split("\n## ")[1:]:
        title, _, table = section.partition("\n")
        sections[title] = table.strip()
    return sections


if __name__ == "__main__":
    main()
