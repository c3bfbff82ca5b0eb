"""Make a model avoid Toronto, and measure what that costs elsewhere.

    python examples/steering.py

A direction is drawn from sentences that lead to Toronto and sentences that lead to
other cities. It is taken out of the hidden states (an ablation) or subtracted from
them. Then the script asks three things of texts that had no part in the direction: how
likely is Toronto, how likely are other cities where they are right, and how well does
the model predict film reviews? Pushes of the same size in random directions stand
beside them. `--quick` takes a few texts of each kind.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from intervals import Mean, mean_interval
from reviews import reviews
from torch import Tensor

import hiddenscope as hs

CITY = " Toronto"
SITES = "layer.20,layer.22,layer.24,layer.26,layer.28"
QUICK_SITES = "layer.26"
# A prompt counts if the unchanged model gives its city at least this probability.
LEAST_PROBABILITY = 0.01
NEW_TOKENS = 8
WRITTEN = 6
BATCH = 8

# The other end of the second direction: sentences that lead to cities elsewhere, with
# the last words of the shipped sentences. None of these cities is asked for later.
ELSEWHERE = [
    "The parliament of Poland meets in the city of",
    "The airport of Sweden's largest city, Arlanda, is near the city of",
    "The Braves are a baseball team from the American city of",
    "Charles University is in the city of",
    "The Dolphins belong to the American city of",
    "The largest city in Pennsylvania is",
    "The capital of the state of Arizona is",
    "The most populous city in the Netherlands is",
    "The government of Belgium has its seat in",
    "The largest airport of Norway is in",
    "The capital of Hungary is called",
    "The largest city in Louisiana is called",
]
# Prompts that had no part in any direction.
PROMPTS = {
    "Toronto": [
        "Ontario's provincial capital is the city of",
        "The Raptors are a basketball team from the city of",
        "The University with the largest campus in Ontario is the University of",
        "The biggest city in Canada by population is",
        "The headquarters of Canada's largest banks are in",
        "The Scotiabank Arena, home of the Raptors, is in downtown",
        "Every September a great film festival is held in the Canadian city of",
        "The city on Lake Ontario with the most inhabitants is",
        "The seat of the government of Ontario is in",
        "On the north shore of Lake Ontario lies the large city of",
    ],
    "Montreal": [
        "The largest city of Quebec is",
        "The Canadiens are a hockey team from",
        "The largest French-speaking city in North America is",
        "Concordia University is in the Canadian city of",
    ],
    "Vancouver": [
        "The largest city of British Columbia is",
        "The 2010 Winter Olympics were held in the city of",
        "Stanley Park is a large park in the Canadian city of",
        "The largest Canadian city on the Pacific coast is",
    ],
    "Ottawa": [
        "The capital of Canada is",
        "Parliament Hill is in the Canadian city of",
    ],
    "Calgary": ["The largest city in Alberta is"],
    "Edmonton": ["The capital of Alberta is", "The Oilers are a hockey team from"],
    "Paris": ["The capital of France is", "The Eiffel Tower stands in the city of"],
    "London": ["The capital of England is the city of", "Big Ben is a clock tower in"],
    "Berlin": [
        "The capital of Germany is",
        "The Brandenburg Gate stands in the city of",
    ],
    "Rome": ["The capital of Italy is", "The Colosseum is an arena in the city of"],
    "Tokyo": ["The capital of Japan is the city of", "The largest city of Japan is"],
    "Chicago": ["The largest city in Illinois is"],
    "Boston": ["The capital of Massachusetts is"],
    "Madrid": ["The capital of Spain is", "The Prado is a museum in"],
    "Sydney": ["The largest city in Australia is"],
    "Moscow": ["The capital of Russia is", "The Kremlin is a fortress in the city of"],
    "Vienna": ["The capital of Austria is"],
    "Athens": ["The capital of Greece is", "The Acropolis is in the city of"],
    "Dublin": ["The capital of Ireland is"],
    "Seattle": ["The largest city in the state of Washington is"],
    "Beijing": ["The capital of China is"],
    "Lisbon": ["The capital of Portugal is"],
    "Detroit": ["The largest city in Michigan is"],
    "Denver": ["The capital of Colorado is"],
}
CANADA = ("Vancouver", "Ottawa", "Calgary", "Edmonton")
# The kinds of prompts, in the order of the figure.
KINDS = ("Toronto", "Montreal", "other Canada", "elsewhere")


def main() -> None:
    """Draw the directions, change the states, and print what that does."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    model = hs.load()
    toronto, montreal, questions = split_sentences()
    reviews_count, random_count, tokens, sites = 24, 6, 32, SITES
    if options.quick:
        questions = questions[::6]
        reviews_count, random_count, tokens, sites = 3, 2, 16, QUICK_SITES

    # The site is chosen on the sentences of the direction, not on the prompts.
    canadian = hs.Direction.between(
        model, toronto, ELSEWHERE, sites=sites, spare_first=True
    )
    chosen = hs.steer(
        model,
        toronto,
        canadian,
        strengths="ablate",
        answers=[CITY, " Montreal"],
        quality=hs.read("plain").texts[:10],
        new_tokens=0,
    )
    print(chosen.summary())
    for suffix in ("html", "nc", "png"):
        chosen.save(options.out / f"steering-sites.{suffix}")
    best = chosen.facts["best"]
    site = canadian.sites[0]
    if best is not None:
        site = best["site"]
    print(f"\nEverything below changes the states at {site}.")

    ids = encode_reviews(model, reviews_count, tokens)
    asked = Entry.record(model, questions, site)
    read = Entry.record(model, ids, site)
    changes = make_changes(model, toronto, montreal, site)
    rng = torch.Generator().manual_seed(0)
    controls = {}
    for number in range(random_count):
        push = random_push(changes["Toronto - elsewhere, ablated"], rng)
        controls[f"random {number}"] = push
    results = measure(asked, read, questions, {**changes, **controls})
    measured = {name: results[name] for name in changes}
    randoms = {name: results[name] for name in controls}
    print_measured(measured, randoms)
    draw(measured, randoms, options.out / "steering-cost.png")
    write_texts(model, questions, changes, site)


@dataclass(frozen=True)
class Question:
    """A prompt, the city that is right, and the kind of city that this is."""

    prompt: str
    city: str
    kind: str


def split_sentences() -> tuple[list[str], list[str], list[Question]]:
    """Return sentences for the directions, and questions that have no part in them.

    Every other shipped sentence makes a direction. The rest are asked.
    """
    data = hs.read("cities-incomplete")
    by_city: dict[str, list[str]] = {"Toronto": [], "Montreal": []}
    for text, label in zip(data.texts, data.labels, strict=True):
        by_city[label].append(text)
    questions = []
    for city, prompts in PROMPTS.items():
        held_out = by_city.get(city, [])[1::2]
        kind = "elsewhere"
        if city in by_city:
            kind = city
        elif city in CANADA:
            kind = "other Canada"
        for prompt in (*prompts, *held_out):
            questions.append(Question(prompt, city, kind))
    return by_city["Toronto"][::2], by_city["Montreal"][::2], questions


def encode_reviews(model: hs.Model, count: int, tokens: int) -> list[list[int]]:
    """Return the first tokens of the first reviews that are long enough."""
    chosen: list[list[int]] = []
    for text in reviews():
        (ids,) = model.encode(text, truncate=True).ids
        if len(ids) >= tokens:
            chosen.append(list(ids[:tokens]))
        if len(chosen) == count:
            break
    return chosen


@dataclass(frozen=True)
class Change:
    """A change of states: along which unit vector they are measured and pushed.

    An ablation pushes a state back by its own component. A subtraction pushes every
    state by the same length.
    """

    measured: Tensor
    pushed: Tensor
    length: float | None = None

    def apply(self, rows: Tensor) -> Tensor:
        """Return the changed states [token, width]."""
        if self.length is None:
            component = rows @ self.measured
            return rows - component[:, None] * self.pushed
        return rows - self.length * self.pushed

    def as_edit(self) -> hs.Project | hs.Add:
        """Return the same change for `hs.editing`."""
        if self.length is None:
            return hs.Project(self.pushed)
        return hs.Add(self.pushed, scale=-self.length)


def make_changes(
    model: hs.Model, toronto: list[str], montreal: list[str], site: str
) -> dict[str, Change]:
    """Return three ways to take the city out, by their names."""
    # The first token of a text has a huge state that attention rests on.
    starts = model.capture(toronto + ELSEWHERE, site).pool("first", site)
    sink = unit(torch.as_tensor(starts).double().mean(0))
    vectors = []
    for away in (montreal, ELSEWHERE):
        direction = hs.Direction.between(model, toronto, away, sites=site)
        vector = direction.vectors[site]
        vectors.append(vector - (vector @ sink) * sink)
    neighbours, world = vectors
    return {
        "Toronto - Montreal, ablated": Change(unit(neighbours), unit(neighbours)),
        "Toronto - elsewhere, ablated": Change(unit(world), unit(world)),
        "Toronto - elsewhere, subtracted": Change(
            unit(world), unit(world), float(world.norm())
        ),
    }


def unit(vector: Tensor) -> Tensor:
    """Return the vector at length 1, in the dtype of the states."""
    return (vector / vector.norm()).float()


def random_push(change: Change, rng: torch.Generator) -> Change:
    """Return pushes as long as those of a change, along a random vector."""
    drawn = unit(torch.randn(len(change.pushed), generator=rng))
    return Change(change.measured, drawn, change.length)


@dataclass(frozen=True)
class Entry:
    """The states of texts at a site, from which only the rest of the model is run."""

    model: hs.Model
    site: str
    batches: list[tuple[list[list[int]], Tensor]]

    @classmethod
    def record(
        cls, model: hs.Model, texts: list[Question] | list[list[int]], site: str
    ) -> "Entry":
        """Run the blocks below the site once for all changes."""
        rows = []
        for text in texts:
            ids = text
            if isinstance(text, Question):
                (ids,) = model.encode(text.prompt).ids
            rows.append(list(ids))
        batches = []
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            batches.append((batch, hs.record(model, batch, site).states[site]))
        return cls(model, site, batches)

    def final_states(self, change: Change | None) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the ids of each text and its last states [token, width]."""
        for batch, rows in self.batches:
            values = rows
            if change is not None:
                values = change.apply(rows)
            # The head is the dearest part; a prompt needs it for its last token alone.
            rest = hs.resume(
                self.model, batch, self.site, values, "final", logits=False
            )
            lengths = [len(ids) for ids in batch]
            final = rest.states["final"].split(lengths)
            yield from zip(batch, final, strict=True)


@torch.no_grad()
def answer_log_probs(
    asked: Entry, questions: list[Question], change: Change | None
) -> np.ndarray:
    """Return the log probability of the right city after each prompt."""
    head = asked.model.module.lm_head
    scores = []
    states = asked.final_states(change)
    for question, (_, final) in zip(questions, states, strict=True):
        (answer,) = asked.model.encode(f" {question.city}").ids[0]
        scores.append(head(final[-1]).log_softmax(-1)[answer].item())
    return np.array(scores)


@torch.no_grad()
def text_losses(read: Entry, change: Change | None) -> np.ndarray:
    """Return the mean loss per token of each review, in nats."""
    head = read.model.module.lm_head
    losses = []
    for ids, final in read.final_states(change):
        targets = torch.tensor(ids[1:])
        loss = torch.nn.functional.cross_entropy(head(final[:-1]), targets)
        losses.append(loss.item())
    return np.array(losses)


@dataclass(frozen=True)
class Measured:
    """What a change does: log ratios by kind of prompt, and of the perplexity."""

    answers: dict[str, Mean]
    perplexity: Mean


def measure(
    asked: Entry, read: Entry, questions: list[Question], changes: dict[str, Change]
) -> dict[str, Measured]:
    """Compare each change with the unchanged model, text by text."""
    before = answer_log_probs(asked, questions, None)
    losses_before = text_losses(read, None)
    known = np.exp(before) >= LEAST_PROBABILITY
    kinds = np.array([question.kind for question in questions])
    measured = {}
    for name, change in changes.items():
        moved = answer_log_probs(asked, questions, change) - before
        answers = {}
        for kind in KINDS:
            answers[kind] = mean_interval(moved[known & (kinds == kind)])
        worse = text_losses(read, change) - losses_before
        measured[name] = Measured(answers, mean_interval(worse))
    counts = [int((known & (kinds == kind)).sum()) for kind in KINDS]
    print(f"Prompts that count: {dict(zip(KINDS, counts, strict=True))}")
    print(f"Perplexity on {len(losses_before)} reviews before:", end=" ")
    print(f"{np.exp(losses_before.mean()):.1f}", flush=True)
    return measured


def print_measured(measured: dict[str, Measured], randoms: dict[str, Measured]) -> None:
    """Print each change with its intervals, and the range of the random pushes."""
    for name, result in measured.items():
        print(f"\n{name}:")
        for kind, mean in result.answers.items():
            low, high = np.exp(random_range(randoms, kind))
            print(f"  {kind}: {mean.factor()}; random {low:.3g} to {high:.3g}")
        low, high = 100 * np.expm1(random_range(randoms, None))
        print(f"  perplexity: {result.perplexity.percent()};", end=" ")
        print(f"random {low:+.2f}% to {high:+.2f}%")


def random_range(randoms: dict[str, Measured], kind: str | None) -> tuple[float, float]:
    """Return the smallest and largest mean over the random directions."""
    means = random_means(randoms, kind)
    return min(means), max(means)


def random_means(randoms: dict[str, Measured], kind: str | None) -> list[float]:
    """Return the mean of each random direction: of a kind, or of the perplexity."""
    means = []
    for result in randoms.values():
        mean = result.perplexity
        if kind is not None:
            mean = result.answers[kind]
        means.append(mean.value)
    return means


def write_texts(
    model: hs.Model, questions: list[Question], changes: dict[str, Change], site: str
) -> None:
    """Let the model write after prompts about Toronto, unchanged and changed."""
    prompts = [question.prompt for question in questions if question.kind == "Toronto"]
    prompts = prompts[:WRITTEN]
    named = {"unchanged": [continuation(model, prompt) for prompt in prompts]}
    for name, change in changes.items():
        with hs.editing(model, {site: change.as_edit()}):
            named[name] = [continuation(model, prompt) for prompt in prompts]
    for name, texts in named.items():
        count = sum(CITY in text for text in texts)
        print(f"\n{name}: {count} of {len(texts)} texts name the city")
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"  {prompt} |{text!r}")


def continuation(model: hs.Model, prompt: str) -> str:
    """Let the model write greedily with its own `generate`."""
    inputs = model.tokenizer(prompt, return_tensors="pt")
    written = model.module.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return model.tokenizer.decode(written[0, inputs["input_ids"].shape[1] :])


def draw(
    measured: dict[str, Measured], randoms: dict[str, Measured], path: Path
) -> None:
    """Draw the factors of the cities above the change of the perplexity."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (cities, cost) = plt.subplots(
        2, 1, figsize=(5.2, 6.2), height_ratios=(4, 1.3)
    )
    colours = ("tab:blue", "tab:red", "tab:orange")
    for number, (name, result) in enumerate(measured.items()):
        shift = 0.2 * (number - 1)
        rows = np.arange(len(KINDS)) + shift
        means = [result.answers[kind] for kind in KINDS]
        draw_means(cities, means, rows, colours[number], np.exp, label=name)
        percent = lambda values: 100 * np.expm1(values)  # noqa: E731
        draw_means(cost, [result.perplexity], [shift], colours[number], percent)
    for row, kind in enumerate(KINDS):
        means = np.exp(random_means(randoms, kind))
        cities.plot(means, np.full(len(means), row + 0.36), "|", color="grey")
    changes = 100 * np.expm1(random_means(randoms, None))
    cost.plot(
        changes,
        np.full(len(changes), 0.36),
        "|",
        color="grey",
        label="same push, random direction",
    )
    cities.set_xscale("log")
    cities.axvline(1.0, color="lightgrey", zorder=0)
    cost.axvline(0.0, color="lightgrey", zorder=0)
    cities.set_yticks(range(len(KINDS)), KINDS)
    cities.invert_yaxis()
    cost.invert_yaxis()
    cost.set_yticks([0], ["film reviews"])
    cities.set_xlabel("probability of the right city, times")
    cost.set_xlabel("perplexity, change in %")
    handles = cities.get_legend_handles_labels()
    extra = cost.get_legend_handles_labels()
    figure.legend(
        handles[0] + extra[0],
        handles[1] + extra[1],
        loc="upper center",
        ncols=1,
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.86))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_means(
    axes: "mpl.axes.Axes",
    means: list[Mean],
    rows: "np.ndarray | list[float]",
    colour: str,
    scale: Callable[[np.ndarray], np.ndarray],
    label: str | None = None,
) -> None:
    """Draw means with their intervals, on the scale of the axes."""
    values, low, high = scale(np.array(means).T)
    errors = np.abs([values - low, high - values])
    axes.errorbar(
        values, rows, xerr=errors, fmt="o", ms=4, color=colour, label=label, lw=1.5
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/steering"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
