"""What `hs.profile` should say: every formula of docs/profile.md, token by token."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist
from scipy.stats import t

import hiddenscope as hs
from tests.oracles import naive

FEWEST_POINTS, DISCARDED, MASSIVE, RANKS = 20, 0.1, 1000, 5
PER_STATE = ("norm", "mean", "deviation", "kurtosis")
# The measures of neurons, and whether they are compared as ratios.
NEURONS = {
    "neuron_activation": True,
    "neuron_peak": True,
    "neuron_write": True,
    "neuron_kurtosis": True,
    "neuron_sparseness": False,
    "neuron_active": False,
    "neuron_entropy": False,
}


def profile(
    model: hs.Model | Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return the expected numbers of a profile of a model's texts."""
    naive.need_model(model)
    final_norm = asked.get("final_norm", "apart")
    if final_norm == "everywhere":
        raise naive.Uncovered("layers through the final norm")
    texts, targets = asked["texts"], asked.get("targets")
    sites = naive.sites_of(result)
    stacks = list(
        dict.fromkeys(site.partition("layer")[0].replace("final", "") for site in sites)
    )
    parts = []
    for stack in stacks:
        here = [site for site in sites if site.startswith(stack)]
        rows = {}
        for site in here:
            rows[site] = naive.rows_at(
                model, texts, site, targets, asked.get("truncate", False)
            )
        parts.append(_Stack(here, rows, final_norm))
    expected: dict[str, np.ndarray] = {}
    for part in parts:
        for name, values in part.variables.items():
            before = expected.get(name)
            expected[name] = values
            if (
                before is not None
                and values.ndim == 2
                and not name.startswith("channel")
            ):
                # Cells between the stacks are empty.
                size = np.add(before.shape, values.shape)
                whole = np.full(size, np.nan)
                whole[: len(before), : before.shape[1]] = before
                whole[len(before) :, before.shape[1] :] = values
                expected[name] = whole
            elif before is not None:
                expected[name] = np.concatenate([before, values])
    for name in ("cka", "cka_others", "cka_chance"):
        # Three tokens at least.
        if not np.isfinite(expected[name]).any():
            del expected[name]
    expected |= _facts(parts, texts)
    if any(site.endswith("mlp.neurons") for site in sites):
        if len(parts) > 1:
            raise naive.Uncovered("neurons of two stacks")
        expected |= _neurons(model, texts, sites, getattr(texts, "groups", None))
    return {name: np.asarray(value) for name, value in expected.items()}


class _Stack:
    """The numbers of one stack."""

    def __init__(
        self, sites: list[str], rows: dict[str, naive.Rows], final_norm: str
    ) -> None:
        self.sites, self.rows = sites, rows
        raw = [site for site in sites if not site.endswith("final")]
        self.compared = raw if final_norm == "apart" and raw else sites
        self.first = rows[sites[0]].position == 0
        self.variables: dict[str, Any] = {name: [] for name in PER_STATE}
        self.massive: list[tuple[str, int, int]] = []
        for site in sites:
            self._measure(site)
        self.variables = {name: np.array(v) for name, v in self.variables.items()}
        self._compare()

    def _put(self, name: str, value: Any) -> None:
        self.variables.setdefault(name, []).append(value)

    def _measure(self, site: str) -> None:
        """Measure one site: each state, then all of them together."""
        states, first = self.rows[site].values, self.first
        columns: dict[str, list[float]] = {name: [] for name in PER_STATE}
        for state in states:
            mean = state.sum() / len(state)
            variance = ((state - mean) ** 2).sum() / len(state)
            columns["norm"].append(np.sqrt((state**2).sum()))
            columns["mean"].append(mean)
            columns["deviation"].append(np.sqrt(variance))
            fourth = ((state - mean) ** 4).sum() / len(state)
            columns["kurtosis"].append(fourth / variance**2 if variance else np.nan)
        for name, column in columns.items():
            self._put(name, column)
        below = self._below(site)
        columns["added"] = [np.nan] * len(states)
        if below is not None:
            for token, (state, under) in enumerate(zip(states, below, strict=True)):
                change = np.linalg.norm(state - under) / np.linalg.norm(under)
                columns["added"][token] = change
        for name, column in columns.items():
            numbers = np.array(column)
            self._put(f"{name}_first", naive.quantile(numbers[first], 0.5))
            self._put(f"{name}_median", naive.quantile(numbers[~first], 0.5))
        others = np.array(columns["norm"])[~first]
        self._put("norm_low", naive.quantile(others, 0.25))
        self._put("norm_high", naive.quantile(others, 0.75))
        for end, some in (("", states), ("_others", states[~first])):
            together = site in self.compared
            self._put(f"anisotropy{end}", anisotropy(some) if together else np.nan)
            rank = effective_rank(some) if together else np.nan
            self._put(f"effective_rank{end}", rank)
            dimension = two_nn(some) if together else np.nan
            self._put(f"intrinsic_dimension{end}", dimension)
        self._channels(site)

    def _below(self, site: str) -> np.ndarray | None:
        """Return the states of the layer below, where it comes right before."""
        place = self.sites.index(site)
        stack, _, layer = site.rpartition("layer.")
        if not layer.isdecimal() or layer == "0":
            # After the last layer comes no block; `final` is a norm of it.
            return None
        under = f"{stack}layer.{int(layer) - 1}"
        if place == 0 or self.sites[place - 1] != under:
            return None
        return self.rows[under].values

    def _channels(self, site: str) -> None:
        """Find the channels with the largest absolute values."""
        rows = self.rows[site]
        sizes = np.abs(rows.values)
        # Of ReLU's neurons most are 0: then nothing is relative to the median.
        median = float(np.median(sizes)) or np.nan
        peaks = sorted(range(sizes.shape[1]), key=lambda c: -sizes[:, c].max())[:RANKS]
        token = [int(sizes[:, channel].argmax()) for channel in peaks]
        values = [rows.values[t, c] for t, c in zip(token, peaks, strict=True)]
        self._put("channel", peaks)
        self._put("channel_value", values)
        self._put("channel_times", [abs(value) / median for value in values])
        self._put("channel_text", rows.text[token])
        self._put("channel_position", rows.position[token])
        if not site.endswith("final"):
            for t, c in np.argwhere(sizes >= MASSIVE * median).tolist():
                self.massive.append((site, t, c))

    def _compare(self) -> None:
        """Compare every pair of sites by linear CKA."""
        size = len(self.sites)
        names = ("cka", "cka_others", "cka_chance")
        squares = {name: np.full((size, size), np.nan) for name in names}
        chance_of = ~self.first if (~self.first).sum() >= 3 else self.first | True
        for i, site in enumerate(self.sites):
            for j, other in enumerate(self.sites):
                if not {site, other} <= set(self.compared):
                    continue
                x, y = self.rows[site].values, self.rows[other].values
                if len(x) >= 3:
                    squares["cka"][i, j] = naive.cka(x, y)
                    chance = naive.cka_by_chance(x[chance_of], y[chance_of])
                    squares["cka_chance"][i, j] = chance
                if (~self.first).sum() >= 3:
                    others = naive.cka(x[~self.first], y[~self.first])
                    squares["cka_others"][i, j] = others
        self.variables |= squares

    def facts(self, where: str) -> dict[str, Any]:
        """Return the facts of the stack that are numbers."""
        variables, sites = self.variables, self.sites
        layers = [i for i, site in enumerate(sites) if not site.endswith("final")]
        quarter = len(layers) // 4
        middle = layers[quarter : len(layers) - quarter]
        facts: dict[str, Any] = {}
        names = {"first_token_norm": "norm_first", "other_tokens_norm": "norm_median"}
        for key, name in names.items():
            column = variables[name]
            if middle and np.isfinite(column[middle]).all():
                facts[key] = np.median(column[middle])
            has_final = sites[-1].endswith("final") and len(sites) > 1 and middle
            if has_final and np.isfinite(column[-2:]).all():
                facts[f"before_final.{key}"] = column[-2]
                facts[f"at_final.{key}"] = column[-1]
        if len([key for key in facts if key in names]) == 2:
            facts["norm_ratio"] = facts["first_token_norm"] / facts["other_tokens_norm"]
        for name in ("anisotropy", "effective_rank"):
            for key, end in (("all_tokens", ""), ("other_tokens", "_others")):
                column = variables[f"{name}{end}"][middle]
                if np.isfinite(column).any():
                    facts[f"{name}.{key}"] = np.nanmedian(column)
        facts["largest_norm.norm"] = variables["norm"].max()
        ends = {
            "intrinsic_dimension": "intrinsic_dimension_others",
            "added": "added_median",
        }
        for key, name in ends.items():
            if np.isfinite(variables[name]).any():
                facts[f"{key}.lowest.value"] = np.nanmin(variables[name])
                facts[f"{key}.highest.value"] = np.nanmax(variables[name])
        times = variables["channel_times"]
        if np.isfinite(times[:, 0]).any():
            site = int(np.nanargmax(times[:, 0]))
            facts["largest_value.times_median"] = times[site, 0]
            facts["largest_value.channel"] = variables["channel"][site, 0]
            facts["largest_value.position"] = variables["channel_position"][site, 0]
        if self.massive:
            facts["massive_activations.threshold"] = MASSIVE
            facts["massive_activations.values"] = len(self.massive)
            at_first = sum(bool(self.first[token]) for _, token, _ in self.massive)
            facts["massive_activations.at_first_tokens"] = at_first
        pairs = np.triu_indices(len(sites), 1)
        if np.isfinite(variables["cka"]).any() and len(self.compared) > 1:
            facts["cka.sampled_tokens"] = len(self.first)
            facts["cka.median"] = np.nanmedian(variables["cka"][pairs])
            facts["cka.median_by_chance"] = np.nanmedian(variables["cka_chance"][pairs])
            least = variables["cka"]
            if np.isfinite(variables["cka_others"]).any():
                least = variables["cka_others"]
                facts["cka.median_other_tokens"] = np.nanmedian(least[pairs])
            facts["cka.least_alike.cka"] = np.nanmin(least[pairs])
        return {f"{where}.{name}": value for name, value in facts.items()}


def _facts(parts: list[_Stack], texts: Any) -> dict[str, Any]:
    tokens = sum(len(part.first) for part in parts)
    facts: dict[str, Any] = {
        "facts.texts": len(naive.strings(texts)),
        "facts.tokens": tokens,
        "facts.tokens_kept": tokens,
    }
    for number, part in enumerate(parts):
        facts |= part.facts(f"facts.stacks.{number}")
    return facts


def anisotropy(states: np.ndarray) -> float:
    """Return the mean cosine of all pairs of different states."""
    lengths = np.linalg.norm(states, axis=1)
    units = [x / length for x, length in zip(states, lengths, strict=True) if length]
    cosines = []
    for i, x in enumerate(units):
        cosines += [float(x @ y) for y in units[:i]]
    return float(np.mean(cosines)) if cosines else float("nan")


def effective_rank(states: np.ndarray) -> float:
    """Return the exponential of the entropy of the spectrum of the covariance."""
    if len(states) < 2:
        return float("nan")
    variances = np.linalg.svd(states - states.mean(0), compute_uv=False) ** 2
    if not variances.sum() > 0 or np.ptp(states, 0).max() == 0:
        return float("nan")
    shares = variances / variances.sum()
    return float(np.exp(-sum(p * np.log(p) for p in shares if p > 0)))


def two_nn(states: np.ndarray) -> float:
    """Estimate the intrinsic dimension (Facco et al. 2017)."""
    # Tokens of one id and no context have one state, which is rounded in each batch.
    distinct: list[np.ndarray] = []
    for state in states:
        reach = 64 * np.finfo(np.float32).eps * np.linalg.norm(state)
        if all(np.linalg.norm(state - other) > reach for other in distinct):
            distinct.append(state)
    if len(distinct) < FEWEST_POINTS:
        return float("nan")
    points = np.array(distinct)
    distances = np.sort(cdist(points, points), axis=1)
    ratios = np.sort(np.log(distances[:, 2] / distances[:, 1]))
    count = int(len(ratios) * (1 - DISCARDED))
    x = ratios[:count]
    y = -np.log(1 - np.arange(1, count + 1) / len(ratios))
    return float(x @ y / (x @ x))


def _neurons(
    model: Any, texts: Any, sites: list[str], groups: Any
) -> dict[str, np.ndarray]:
    """Measure the neurons of every layer over all texts, and without each batch."""
    every = naive.strings(texts)
    keys = [naive.copy_key(text) for text in every]
    group_of = naive.groups_of(every, groups)
    firsts = [number for number, key in enumerate(keys) if keys.index(key) == number]
    known = sorted({int(group_of[number]) for number in firsts})
    batch_of_text = {number: known.index(group_of[number]) % 20 for number in firsts}
    of_neurons = [site for site in sites if site.endswith("mlp.neurons")]
    values = []
    for site in of_neurons:
        rows = naive.rows_at(model, texts, site)
        counts = (rows.position > 0) & np.isin(rows.text, firsts)
        batch = np.array([batch_of_text.get(int(text), -1) for text in rows.text])
        stem = site.removesuffix(".neurons")
        written = naive.rows_at(model, texts, stem).values
        under = naive.rows_at(model, texts, stem.removesuffix("mlp") + "mid").values
        writes = np.linalg.norm(written, axis=1) / np.linalg.norm(under, axis=1)
        types = frequent_types(rows.ids[counts])
        measured = [_measured(rows, counts, writes, types)]
        for number in range(int(batch[counts].max()) + 1):
            without = counts & (batch != number)
            measured.append(_measured(rows, without, writes, types))
        values.append(measured)
    sizes = np.bincount(batch[counts])
    freedom = max(1.0, sizes.sum() ** 2 / (sizes**2).sum() - 1)
    table = np.array(values)
    expected = {}
    for number, (name, is_ratio) in enumerate(NEURONS.items()):
        columns = {end: np.full(len(sites), np.nan) for end in ("", "_low", "_high")}
        for site, of_site in zip(of_neurons, table[..., number], strict=True):
            place = sites.index(site)
            columns[""][place] = of_site[0]
            scaled = np.log(of_site) if is_ratio else of_site
            reach = t.ppf(0.975, freedom) * jackknife(scaled[1:])
            ends = scaled[0] - reach, scaled[0] + reach
            ends = tuple(np.exp(ends)) if is_ratio else tuple(np.clip(ends, 0, 1))
            columns["_low"][place], columns["_high"][place] = ends
        expected |= {f"{name}{end}": column for end, column in columns.items()}
    where = "facts.stacks.0.neurons"
    expected[f"{where}.tokens"] = np.array(int(counts.sum()))
    expected[f"{where}.texts"] = np.array(len(firsts))
    expected[f"{where}.groups"] = np.array(len(known))
    expected[f"{where}.types"] = np.array(len(types))
    if len(of_neurons) > 1 and len(known) > 1:
        expected |= _against_previous(table, freedom, f"{where}.against_previous")
    return expected


def _against_previous(
    table: np.ndarray, freedom: float, where: str
) -> dict[str, np.ndarray]:
    """Compare the last layer with the one before; p is corrected by Holm's method."""
    gaps = []
    for number, is_ratio in enumerate(NEURONS.values()):
        both = table[-2:, :, number]
        scaled = np.log(both) if is_ratio else both
        difference = scaled[1] - scaled[0]
        error = jackknife(difference[1:])
        if not error > 0:
            continue
        p = 2 * t.sf(abs(difference[0]) / error, freedom)
        reach = t.ppf(0.975, freedom) * error
        ends = np.array([difference[0], difference[0] - reach, difference[0] + reach])
        gaps.append((np.exp(ends) if is_ratio else ends, p))
    expected = {}
    for number, (ends, p) in enumerate(gaps):
        smaller = sorted(other for _, other in gaps)
        steps = [
            (len(gaps) - k) * other for k, other in enumerate(smaller) if other <= p
        ]
        expected[f"{where}.{number}.p"] = np.array(min(1.0, max(steps)))
        for name, end in zip(("value", "low", "high"), ends, strict=True):
            expected[f"{where}.{number}.{name}"] = np.array(end)
    return expected


def jackknife(without: np.ndarray) -> float:
    """Return the jackknife error of a number that was measured without each batch."""
    count = len(without)
    if count < 2:
        return float("nan")
    return float(np.sqrt((count - 1) / count * sum((without - without.mean()) ** 2)))


def frequent_types(ids: np.ndarray) -> list[int]:
    """Return the most frequent ids with 20 tokens or more, at most 64."""
    counts = {int(token): int((ids == token).sum()) for token in ids}
    ordered = sorted(counts, key=lambda token: (-counts[token], token))[:64]
    return [token for token in ordered if counts[token] >= 20]


def _measured(
    rows: naive.Rows, counts: np.ndarray, writes: np.ndarray, types: list[int]
) -> list[float]:
    """Return every measure of neurons over the tokens that count."""
    values, ids = rows.values[counts], rows.ids[counts]
    if not len(values):
        return [np.nan] * len(NEURONS)
    sizes = np.abs(values)
    kurtosis, sparseness, active, entropy = [], [], [], []
    for column in values.T:
        size, square = np.abs(column).mean(), (column**2).mean()
        away = column - column.mean()
        variance = (away**2).mean()
        if variance > 1e-12 * square:
            kurtosis.append((away**4).mean() / variance**2)
        if not square > 0:
            continue
        sparseness.append((1 - size**2 / square) / (1 - 1 / len(column)))
        active.append((np.abs(column) >= 0.5 * np.sqrt(square)).mean())
        means = []
        for token in types:
            if (ids == token).any():
                means.append(np.abs(column[ids == token]).mean())
        if len(means) >= 5:
            shares = np.array(means) / sum(means)
            terms = [-share * np.log(share) for share in shares if share > 0]
            entropy.append(sum(terms) / np.log(len(means)))
    peak = np.mean([np.quantile(row, 0.99) for row in sizes])
    medians = [naive.quantile(x, 0.5) for x in (kurtosis, sparseness, active, entropy)]
    return [float(sizes.mean()), float(peak), float(writes[counts].mean()), *medians]
