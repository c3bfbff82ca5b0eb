"""Exchanged subspaces: one pass for each pair, with its source's state in place."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hiddenscope as hs
from hiddenscope.causes.contrast import read_interchanges
from hiddenscope.causes.encoding import encode_distinct
from hiddenscope.linear.crossvalidation import assign_folds
from tests.oracles.plain import NoTable, Pair, Plain, pairs_of

FOLDS, DRAWS = 2, 4


def variable(
    model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> dict[str, np.ndarray]:
    """Return the accuracies of what is exchanged.

    Of a subspace that was learned, only what needs no subspace: that of one half of the
    pairs is not in the result. Left out are the controls `read`, `unread`, `shuffled`
    and `reinitialised`, which are learned themselves or made of gradients, and
    intervals. Folds and random directions are those that were drawn.
    """
    listed = asked["pairs"]
    if isinstance(listed, str):
        listed = read_interchanges(listed)
    plain = Plain(model.module)
    if len(plain.shapes) > 1:
        raise NoTable("no variable of two stacks")
    pairs = pairs_of(model, list(listed))
    exchange = _Exchange(plain, pairs, asked)
    exchange.find_folds(model, listed)
    data = result.data
    names = ["unchanged", "whole"]
    if exchange.is_known:
        names += ["learned", "mismatched", "random", "basis"]
    numbers = {name: np.full(data[name].shape, np.nan) for name in names}
    for row, site in enumerate(data["site"].values.tolist()):
        for column, token in enumerate(data["token"].values.tolist()):
            found = exchange.cell(site, token, data["basis"].values[row, column])
            for name in names if found else ():
                numbers[name][row, column] = found[name]
    return numbers


class _Exchange:
    def __init__(
        self, plain: Plain, pairs: Sequence[Pair], asked: Mapping[str, Any]
    ) -> None:
        self.plain = plain
        self.pairs = pairs
        self.subspace = asked.get("subspace", "learned")
        self.rank = asked.get("rank", 1)
        self.seed = asked.get("seed", 0)
        answers = {answer for pair in pairs for answer in (pair.answer, pair.other)}
        self.candidates = sorted(answers)
        self.wrong = np.random.default_rng(self.seed).permutation(len(pairs))
        self.folds = np.zeros(len(pairs), dtype=int)

    @property
    def is_known(self) -> bool:
        """Tell whether the subspace can be told without learning it."""
        return not isinstance(self.subspace, str) or self.subspace == "pca"

    def find_folds(self, model: hs.Model, listed: Any) -> None:
        """Put each pair into the fold that it was drawn into."""
        groups = encode_distinct(model, listed, one_form=False).groups
        others = [pair.other for pair in self.pairs]
        classes = np.unique(others, return_inverse=True)[1]
        self.folds = assign_folds(classes, [*map(str, groups)], FOLDS, self.seed)

    def position(self, pair: Pair, token: str) -> int:
        """Return the position of a token that is looked at, in one pair."""
        clean, corrupt = (side["input_ids"][0] for side in (pair.clean, pair.corrupt))
        if token == "the answering token":
            return pair.at[0]
        if token == "the differing token":
            sides = zip(clean, corrupt, strict=True)
            return [number for number, (a, b) in enumerate(sides) if a != b][-1]
        return int(token.removeprefix("token ")) % len(clean)

    def cell(self, site: str, token: str, basis: np.ndarray) -> dict[str, Any]:
        """Return the accuracies at one site and token; none where states are equal."""
        places = [self.position(pair, token) for pair in self.pairs]
        base, source = [], []
        for pair, place in zip(self.pairs, places, strict=True):
            base.append(self.plain.run(pair.clean, [site])[1][site][0, place])
            source.append(self.plain.run(pair.corrupt, [site])[1][site][0, place])
        bases, sources = torch.stack(base), torch.stack(source)
        away = sources - bases
        if not bool((away.abs() > 1e-12).any()):
            return {}

        def accuracy(values: Tensor) -> float:
            hits = []
            for number, (pair, place) in enumerate(
                zip(self.pairs, places, strict=True)
            ):
                hits.append(self.hit(pair, site, place, values[number]))
            return float(np.mean(hits))

        numbers: dict[str, Any] = {
            "unchanged": accuracy(bases),
            "whole": accuracy(sources),
        }
        if not self.is_known:
            return numbers
        subspaces = [self.rows(site, away, fold) for fold in range(FOLDS)]
        moved = self.moved(away, subspaces)
        numbers["learned"] = accuracy(bases + moved)
        wrong = self.moved(sources[self.wrong.tolist()] - bases, subspaces)
        numbers["mismatched"] = accuracy(bases + wrong)
        generator = torch.Generator().manual_seed(self.seed)
        draws = []
        for _ in range(DRAWS):
            shape = subspaces[0].T.shape
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            rows = torch.linalg.qr(drawn)[0].T
            along = away @ rows.T @ rows
            scale = moved.norm(dim=1) / along.norm(dim=1).clamp_min(1e-30)
            draws.append(accuracy(bases + scale[:, None] * along))
        numbers["random"] = np.mean(draws)
        # Its rows lie in what both halves have in common, however they are turned.
        common = torch.linalg.svd(torch.cat(subspaces))[2][: len(subspaces[0])]
        inside = torch.as_tensor(basis)[:, : away.shape[1]] @ common.T @ common
        numbers["basis"] = np.full(basis.shape, np.nan)
        numbers["basis"][:, : away.shape[1]] = inside
        return numbers

    def rows(self, site: str, away: Tensor, fold: int) -> Tensor:
        """Return orthonormal rows of the subspace that is tested on a fold."""
        if isinstance(self.subspace, str):
            others = away[(self.folds != fold).tolist()]
            return torch.linalg.svd(others)[2][: self.rank]
        rows: Any = self.subspace
        if hasattr(rows, "coef_"):
            rows = hs.Direction.of(rows)
        if isinstance(rows, hs.Direction):
            rows = rows.vector_at(hs.Site.parse(site), away.shape[1])
        rows = torch.as_tensor(np.asarray(rows)).double().reshape(-1, away.shape[1])
        return torch.linalg.qr(rows.T)[0].T

    def moved(self, away: Tensor, subspaces: Sequence[Tensor]) -> Tensor:
        """Return what lies in the subspace of each pair's fold."""
        rows = []
        for number, fold in enumerate(self.folds.tolist()):
            rows.append(away[number] @ subspaces[fold].T @ subspaces[fold])
        return torch.stack(rows)

    def hit(self, pair: Pair, site: str, place: int, value: Tensor) -> bool:
        """Tell whether the counterfactual comes first with a value in place."""

        def put(state: Tensor) -> Tensor:
            state = state.clone()
            state[0, place] = value
            return state

        logits = self.plain.run(pair.clean, (), {site: put})[0][0, pair.at[0]]
        best = max(self.candidates, key=lambda answer: float(logits[answer]))
        return best == pair.other
