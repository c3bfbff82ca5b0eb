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
# A prompt counts if the unchanged model gives its city at least this probability.
LEAST_PROBABILITY = 0.01
BATCH = 8

# The other end of the second direction: sentences that lead to cities elsewhere, with
# the last words of the shipped sentences. None of these cities is asked for later.
ELSEWHERE = """
The parliament of Poland meets in the city of
The airport of Sweden's largest city, Arlanda, is near the city of
The Braves are a baseball team from the American city of
Charles University is in the city of
The Dolphins belong to the American city of
The largest city in Pennsylvania is
The capital of the state of Arizona is
The most populous city in the Netherlands is
The government of Belgium has its seat in
The largest airport of Norway is in
The capital of Hungary is called
The largest city in Louisiana is called
""".strip().splitlines()
# Prompts that had no part in any direction, each behind the city that is right.
PROMPTS = """
Toronto: Ontario's provincial capital is the city of
Toronto: The Raptors are a basketball team from the city of
Toronto: The University with the largest campus in Ontario is the University of
Toronto: The biggest city in Canada by population is
Toronto: The headquarters of Canada's largest banks are in
Toronto: The Scotiabank Arena, home of the Raptors, is in downtown
Toronto: Every September a great film festival is held in the Canadian city of
Toronto: The city on Lake Ontario with the most inhabitants is
Toronto: The seat of the government of Ontario is in
Toronto: On the north shore of Lake Ontario lies the large city of
Montreal: The largest city of Quebec is
Montreal: Expo 67, the world's fair, took place in the city of
Montreal: The largest French-speaking city in North America is
Montreal: Concordia University is in the Canadian city of
Vancouver: The largest city of British Columbia is
Vancouver: The 2010 Winter Olympics were held in the city of
Vancouver: Stanley Park is a large park in the Canadian city of
Vancouver: The largest Canadian city on the Pacific coast is
Ottawa: The capital of Canada is
Ottawa: Parliament Hill is in the Canadian city of
Calgary: The largest city in Alberta is
Edmonton: The capital of Alberta is
Edmonton: The Oilers are a hockey team from
Paris: The capital of France is
Paris: The Eiffel Tower stands in the city of
London: The capital of England is the city of
London: Big Ben is a clock tower in
Berlin: The capital of Germany is
Berlin: The Brandenburg Gate stands in the city of
Rome: The capital of Italy is
Rome: The Colosseum is an arena in the city of
Tokyo: The capital of Japan is the city of
Tokyo: The largest city of Japan is
Chicago: The largest city in Illinois is
Boston: The capital of Massachusetts is
Madrid: The capital of Spain is
Madrid: The Prado is a museum in
Sydney: The largest city in Australia is
Moscow: The capital of Russia is
Moscow: The Kremlin is a fortress in the city of
Vienna: The capital of Austria is
Athens: The capital of Greece is
Athens: The Acropolis is in the city of
Dublin: The capital of Ireland is
Seattle: The largest city in the state of Washington is
Beijing: The capital of China is
Lisbon: The capital of Portugal is
Detroit: The largest city in Michigan is
Denver: The capital of Colorado is
""".strip().splitlines()
CANADA = ("Vancouver", "Ottawa", "Calgary", "Edmonton")
# The kinds of prompts, in the order of the figure.
KINDS = ("Toronto", "Montreal", "other Canada", "elsewhere")
REVIEWS = "film reviews"


@dataclass(frozen=True)
class Size:
    """How much is computed: counts of texts and of tokens."""

    sites: str
    sentences: int
    quality: int
    prompts: int
    reviews: int
    review_tokens: int
    randoms: int
    written: int
    new_tokens: int


FULL = Size(
    sites="layer.20,layer.22,layer.24,layer.26,layer.28",
    sentences=13,
    quality=10,
    prompts=99,
    reviews=24,
    review_tokens=24,
    randoms=6,
    written=6,
    new_tokens=8,
)
QUICK = Size(
    sites="layer.28",
    sentences=3,
    quality=2,
    prompts=3,
    reviews=2,
    review_tokens=8,
    randoms=1,
    written=1,
    new_tokens=2,
)


def main() -> None:
    """Draw the directions, change the states, and print what that does."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    model = hs.load()
    size = FULL
    if options.quick:
        size = QUICK
    toronto, montreal, questions = split_sentences()
    questions = some_of_each_kind(questions, size.prompts)
    chosen = choose_site(model, size)
    print(chosen.summary())
    for suffix in ("html", "nc", "png"):
        chosen.save(options.out / f"steering-sites.{suffix}")
    best = chosen.facts["best"]
    if best is None:
        site = str(chosen.data["site"].values[0])
        print("\nNo site keeps the perplexity within 5%, so the first one is taken.")
    else:
        site = best["site"]
    print(f"\nEverything below changes the states at {site}.")

    ids = encode_reviews(model, size)
    asked = Entry.record(model, questions, site)
    read = Entry.record(model, ids, site)
    toronto = toronto[: size.sentences]
    montreal = montreal[: size.sentences]
    changes = make_changes(model, toronto, montreal, site)
    controlled = with_controls(changes, size.randoms)
    measured = measure(asked, read, questions, controlled)
    for name, result in measured.items():
        print_measured(name, result)
    draw(measured, options.out / "steering-cost.png")
    questions = questions[: size.written]
    write_texts(model, questions, changes, site, size.new_tokens)


def choose_site(model: hs.Model, size: Size = FULL) -> hs.Result:
    """Ablate "Toronto - elsewhere" at each site, on the sentences that made it.

    The prompts that are asked later have no say in the choice.
    """
    toronto, _, _ = split_sentences()
    toward = toronto[: size.sentences]
    away = ELSEWHERE[: size.sentences]
    direction = hs.Direction.between(
        model, toward, away, sites=size.sites, spare_first=True
    )
    sentences = hs.read("plain").texts
    return hs.steer(
        model,
        toward,
        direction,
        strengths="ablate",
        answers=[CITY, " Montreal"],
        quality=sentences[: size.quality],
        new_tokens=0,
    )


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
    prompts: dict[str, list[str]] = {}
    for line in PROMPTS:
        city, prompt = line.split(": ", 1)
        prompts.setdefault(city, []).append(prompt)
    questions = []
    for city, of_city in prompts.items():
        held_out = by_city.get(city, [])[1::2]
        kind = "elsewhere"
        if city in by_city:
            kind = city
        elif city in CANADA:
            kind = "other Canada"
        for prompt in of_city + held_out:
            questions.append(Question(prompt, city, kind))
    toronto = by_city["Toronto"][::2]
    montreal = by_city["Montreal"][::2]
    return toronto, montreal, questions


def some_of_each_kind(questions: list[Question], count: int) -> list[Question]:
    """Return at most so many questions of each kind."""
    chosen: list[Question] = []
    for kind in KINDS:
        alike = [question for question in questions if question.kind == kind]
        chosen += alike[:count]
    return chosen


def encode_reviews(model: hs.Model, size: Size) -> list[list[int]]:
    """Return the first tokens of the first reviews that are long enough."""
    chosen: list[list[int]] = []
    for text in reviews():
        (ids,) = model.encode(text, truncate=True).ids
        start = ids[: size.review_tokens]
        if len(start) == size.review_tokens:
            chosen.append(list(start))
        if len(chosen) == size.reviews:
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
        """Return the same change for `hs.editing`; a random control has none."""
        assert self.measured is self.pushed
        if self.length is None:
            return hs.Project(self.pushed)
        return hs.Add(self.pushed, scale=-self.length)


def make_changes(
    model: hs.Model, toronto: list[str], montreal: list[str], site: str
) -> dict[str, Change]:
    """Return three ways to take the city out, by their names."""
    # The first token of a text has a huge state that attention rests on: its direction
    # is taken out, so that the changes leave it alone. `spare_first=True` would do so
    # with the texts of each direction; both are to be freed of the same vector here.
    elsewhere = ELSEWHERE[: len(toronto)]
    states = model.capture(toronto + elsewhere, site)
    starts = torch.as_tensor(states.pool("first", site))
    sink = unit(starts.mean(0)).double()
    vectors = []
    for away in (montreal, elsewhere):
        direction = hs.Direction.between(model, toronto, away, sites=site)
        vector = direction.vectors[site]
        along_sink = (vector @ sink) * sink
        vectors.append(vector - along_sink)
    neighbours, world = vectors
    length = float(world.norm())
    neighbours, world = unit(neighbours), unit(world)
    return {
        "Toronto - Montreal, ablated": Change(neighbours, neighbours),
        "Toronto - elsewhere, ablated": Change(world, world),
        "Toronto - elsewhere, subtracted": Change(world, world, length),
    }


def unit(vector: Tensor) -> Tensor:
    """Return the vector at length 1, in the dtype of the states."""
    return (vector / vector.norm()).float()


def with_controls(changes: dict[str, Change], count: int) -> dict[str, list[Change]]:
    """Return each change, followed by random pushes of the same size."""
    controlled = {}
    for name, change in changes.items():
        # The same directions for every change.
        rng = torch.Generator().manual_seed(0)
        randoms = [random_push(change, rng) for _ in range(count)]
        controlled[name] = [change, *randoms]
    return controlled


def random_push(change: Change, rng: torch.Generator) -> Change:
    """Return pushes as long as those of a change, along a random vector."""
    width = len(change.pushed)
    drawn = torch.randn(width, generator=rng)
    return Change(change.measured, unit(drawn), change.length)


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
            states = hs.record(model, batch, site).states
            batches.append((batch, states[site]))
        return cls(model, site, batches)

    def final_states(self, change: Change | None) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the ids of each text and its last states [token, width]."""
        for batch, rows in self.batches:
            values = rows
            if change is not None:
                values = change.apply(rows)
            # The head costs most, and a prompt needs it for its last token alone.
            rest = hs.resume(
                self.model, batch, self.site, values, "final", logits=False
            )
            lengths = [len(ids) for ids in batch]
            final = rest.states["final"].split(lengths)
            yield from zip(batch, final, strict=True)

    @torch.no_grad()
    def logits(self, final: Tensor) -> Tensor:
        """Return the score of every token after the last states, on the CPU."""
        head = self.model.module.lm_head
        return head(final.to(head.weight.device)).cpu()


def answer_log_probs(
    asked: Entry, questions: list[Question], change: Change | None
) -> np.ndarray:
    """Return the log probability of the right city after each prompt."""
    scores = []
    states = asked.final_states(change)
    for question, (_, final) in zip(questions, states, strict=True):
        (answer,) = asked.model.encode(f" {question.city}").ids[0]
        log_probs = asked.logits(final[-1]).log_softmax(-1)
        scores.append(log_probs[answer].item())
    return np.array(scores)


def text_losses(read: Entry, change: Change | None) -> np.ndarray:
    """Return the mean loss per token of each review, in nats."""
    losses = []
    for ids, final in read.final_states(change):
        targets = torch.tensor(ids[1:])
        logits = read.logits(final[:-1])
        loss = torch.nn.functional.cross_entropy(logits, targets)
        losses.append(loss.item())
    return np.array(losses)


@dataclass(frozen=True)
class Measured:
    """What a change does: log ratios by kind of prompt, and of the perplexity.

    `random` holds the mean of each push of the same size in a random direction.
    """

    answers: dict[str, Mean]
    perplexity: Mean
    random: dict[str, list[float]]


def measure(
    asked: Entry,
    read: Entry,
    questions: list[Question],
    changes: dict[str, list[Change]],
) -> dict[str, Measured]:
    """Compare each change with the unchanged model, text by text."""
    before = answer_log_probs(asked, questions, None)
    losses = text_losses(read, None)
    counted = prompts_that_count(questions, before)
    counts = {kind: int(prompts.sum()) for kind, prompts in counted.items()}
    print(f"Prompts that count: {counts}")
    perplexity = np.exp(losses.mean())
    print(f"{len(losses)} reviews, perplexity {perplexity:.1f}", flush=True)
    measured = {}
    for name, variants in changes.items():
        moved = []
        worse = []
        for variant in variants:
            after = answer_log_probs(asked, questions, variant)
            moved.append(after - before)
            worse.append(text_losses(read, variant) - losses)
        measured[name] = summarise(np.array(moved), np.array(worse), counted)
    return measured


def prompts_that_count(
    questions: list[Question], log_probs: np.ndarray
) -> dict[str, np.ndarray]:
    """Mark the prompts of each kind whose city the unchanged model knows."""
    known = np.exp(log_probs) >= LEAST_PROBABILITY
    kinds = np.array([question.kind for question in questions])
    return {kind: known & (kinds == kind) for kind in KINDS}


def summarise(
    moved: np.ndarray, worse: np.ndarray, counted: dict[str, np.ndarray]
) -> Measured:
    """Average over texts; the first row is the change, the others are random."""
    answers = {}
    random = {REVIEWS: worse[1:].mean(1).tolist()}
    for kind, prompts in counted.items():
        of_kind = moved[:, prompts]
        answers[kind] = mean_interval(of_kind[0])
        random[kind] = of_kind[1:].mean(1).tolist()
    return Measured(answers, mean_interval(worse[0]), random)


def print_measured(name: str, result: Measured) -> None:
    """Print a change with its intervals, and the range of the random pushes."""
    print(f"\n{name}:")
    for kind, mean in result.answers.items():
        factors = np.exp(result.random[kind])
        low, high = factors.min(), factors.max()
        print(f"  {kind}: {mean.factor()}; random {low:.3g} to {high:.3g}")
    costs = as_percent(np.array(result.random[REVIEWS]))
    low, high = costs.min(), costs.max()
    print(f"  perplexity: {result.perplexity.percent()};", end=" ")
    print(f"random {low:+.2f}% to {high:+.2f}%", flush=True)


def write_texts(
    model: hs.Model,
    questions: list[Question],
    changes: dict[str, Change],
    site: str,
    new_tokens: int,
) -> None:
    """Let the model write after the prompts, unchanged and changed."""
    prompts = [question.prompt for question in questions]

    def write() -> list[str]:
        return [continuation(model, prompt, new_tokens) for prompt in prompts]

    named = {"unchanged": write()}
    for name, change in changes.items():
        with hs.editing(model, {site: change.as_edit()}):
            named[name] = write()
    for name, texts in named.items():
        count = sum(CITY in text for text in texts)
        print(f"\n{name}: {count} of {len(texts)} texts name the city")
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"  {prompt} |{text!r}")


def continuation(model: hs.Model, prompt: str, new_tokens: int) -> str:
    """Let the model write greedily with its own `generate`."""
    inputs = model.tokenizer(prompt, return_tensors="pt").to(model.device)
    (ids,) = model.module.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    length = inputs["input_ids"].shape[1]
    return model.tokenizer.decode(ids[length:], clean_up_tokenization_spaces=False)


def draw(measured: dict[str, Measured], path: Path) -> None:
    """Draw the factors of the cities above the change of the perplexity."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (cities, cost) = plt.subplots(
        2, 1, figsize=(5.2, 6.2), height_ratios=(4, 1.3)
    )
    colours = ("tab:blue", "tab:red", "tab:orange")
    for number, (name, result) in enumerate(measured.items()):
        colour = colours[number]
        rows = np.arange(len(KINDS)) + 0.26 * (number - 1)
        means = [result.answers[kind] for kind in KINDS]
        draw_means(cities, means, rows, colour, np.exp, label=name)
        draw_means(cost, [result.perplexity], rows[:1], colour, as_percent)
        for row, kind in zip(rows, KINDS, strict=True):
            factors = np.exp(result.random[kind])
            draw_random(cities, factors, row)
        costs = as_percent(np.array(result.random[REVIEWS]))
        draw_random(cost, costs, rows[0])
    cities.set_xscale("log")
    cities.axvline(1.0, color="lightgrey", zorder=0)
    cost.axvline(0.0, color="lightgrey", zorder=0)
    for axes, names in ((cities, KINDS), (cost, ["reviews"])):
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
    cities.set_xlabel("probability of the right city, times")
    cost.set_xlabel("perplexity, change in %")
    title = "grey: same push, random directions"
    figure.legend(loc="upper center", frameon=False, fontsize=9, title=title)
    figure.tight_layout(rect=(0, 0, 1, 0.84))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def as_percent(log_ratios: np.ndarray) -> np.ndarray:
    """Return log ratios as changes in percent."""
    return 100 * np.expm1(log_ratios)


def draw_random(axes: "mpl.axes.Axes", values: np.ndarray, row: float) -> None:
    """Draw what random pushes do, below the change that is as large."""
    heights = np.full(len(values), row + 0.1)
    axes.plot(values, heights, "|", color="grey", ms=5)


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
