"""Draw the pictures of the docs again, with the default model: `make docs`.

    python -m docs.pictures                     all of them
    python -m docs.pictures port.nc drift.png   some of them

Results that the site shows live are saved in docs/results/, and their pictures are
drawn from there. The averages in visibility-average.nc are those that
examples/visibility.py wrote on a GPU.
"""

import argparse
import copy
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch

import hiddenscope as hs
from hiddenscope.results import views_of
from hiddenscope.results.pictures import Grid, Measure, View
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views.figures.pages import image

FOLDER = Path(__file__).with_name("pictures")
RESULTS = Path(__file__).with_name("results")
EXAMPLES = Path(__file__).parent.parent / "examples"
DPI = 130  # sharp on a screen, and small
SENTENCE, ANOTHER = (
    "The capital of France is Paris.",
    "The capital of Germany is Berlin.",
)
CAPITALS = hs.Contrast(
    "The capital of France is", "The capital of Germany is", " Paris", " Berlin"
)
ANSWERS = {
    "France": " Paris",
    "Germany": " Berlin",
    "Italy": " Rome",
    "Spain": " Madrid",
    "Japan": " Tokyo",
    "China": " Beijing",
    "Russia": " Moscow",
    "Greece": " Athens",
    "Egypt": " Cairo",
    "Austria": " Vienna",
}
REPEATED = "Mr Dursley was thin and bold. Mr Dursley was"
CHILD = "As a child I wanted to become a"
CITIES = {name: name for name in ("cities-incomplete", "cities-complete")}
SOME = "layer.0,layer.8,layer.16,layer.24,layer.29"
TOPICS = (
    "Whisk the eggs.",
    "Simmer the sauce.",
    "Knead the dough.",
    "Roast the carrots.",
    "Salt the soup.",
    "Fry onions.",
    "A probe orbits Saturn.",
    "A distant star.",
    "The rocket lifted off.",
    "A spiral galaxy.",
    "A rover on Mars.",
    "The Moon.",
)
QUERIES = ["How do I cook rice?", "news from space"]


def main() -> None:
    """Compute and draw what the command line names, or everything."""
    results, pictures = live_results(), views()
    names = _names([*results, *pictures])
    model = hs.load()
    # Results first: pictures are drawn from those that are saved.
    for name, compute in results.items():
        if name in names:
            compute(model).save(RESULTS / name)
            print(f"Wrote docs/results/{name}", flush=True)
    for name, draw in pictures.items():
        if name in names:
            picture = image(draw(model), ".png", dpi=DPI)
            (FOLDER / name).write_bytes(picture)
            size = len(picture) / 1000
            print(f"Wrote docs/pictures/{name}: {size:.0f} kB", flush=True)


def live_results() -> dict[str, Callable[[hs.Model], hs.Result]]:
    """Return how each result that a page shows live is computed, by its name."""
    return {
        "visibility.nc": lambda model: hs.visibility(model, SENTENCE),
        "compare.nc": lambda model: hs.compare(model, SENTENCE, ANOTHER),
        "lens.nc": capital_lens,
        "contributions.nc": capital_contributions,
        "patch.nc": lambda model: hs.patch(model, CAPITALS),
        "drift.nc": wrong_scale,
        "steer.nc": montreal,
        "cluster.nc": lambda _: hs.cluster(minilm(), list(TOPICS), smallest=3),
        "two-sentences-patch.nc": lambda model: hs.patch(model, CAPITALS, layers=0),
        "cities.nc": lambda model: experiment("cities").pictured(model),
        "steering.nc": lambda model: experiment("steering").choose_site(model),
        "hooks.nc": lambda model: hs.profile(model, SENTENCE),
        "lenses.nc": capital_tuned_lens,
        "port.nc": unscaled_port,
    }


def saved(name: str) -> Sequence[View]:
    """Return the views of a result that a page shows live."""
    return views_of(hs.Result.load(RESULTS / name))


def experiment(name: str) -> ModuleType:
    """Return the script of an experiment, which computes what its page shows."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def views() -> dict[str, Callable[[hs.Model], Sequence[View]]]:
    """Return how each picture's views are made, by its name."""
    return {
        "anatomy.png": lambda model: views_of(hs.anatomy(model))[:1],
        "norms.png": lambda _: saved("hooks.nc")[:2],
        "difference.png": lambda _: saved("compare.nc")[:2],
        "drift.png": lambda _: saved("drift.nc")[1:2],
        "start.png": lambda model: views_of(hs.lens(model, CHILD))[:1],
        "lens.png": lambda _: saved("lens.nc")[:1],
        "attention.png": lambda model: views_of(late_attention(model))[:1],
        "contributions.png": lambda _: saved("contributions.nc")[:1],
        "patch.png": lambda _: saved("patch.nc"),
        "edges.png": lambda model: views_of(hs.edges(model, CAPITALS))[:1],
        "series.png": lambda _: views_of(training_run())[:2],
        "features.png": lambda model: views_of(drawn_features(model))[1:2],
        "variable.png": lambda model: views_of(number_of_subject(model)),
        "circuit.png": lambda model: views_of(hs.circuit(model, CAPITALS, random=1))[
            :1
        ],
        "graft.png": lambda model: views_of(broken_attention(model))[:1],
        "steer.png": lambda _: saved("steer.nc")[:1],
        "visibility.png": lambda _: saved("visibility.nc")[:2],
        "cities.png": cities,
        "probe.png": lambda model: views_of(hs.probe(model, "cities-incomplete"))[:1],
        "embed.png": lambda _: (cosines(minilm()),),
        "search.png": lambda _: nearest_texts(minilm()),
        "examples.png": lambda model: views_of(full_stops(model))[:1],
        "cluster.png": lambda _: saved("cluster.nc")[:1],
        "experiments/lenses-tuned.png": lambda _: saved("lenses.nc")[:1],
        "experiments/port-drift.png": lambda _: saved("port.nc")[1:2],
    }


@cache
def minilm() -> hs.Model:
    """Load the encoder once."""
    return hs.load("minilm")


def cities(model: hs.Model) -> Sequence[View]:
    """Return a map of a few layers, and the scores along all layers."""
    few = hs.project(model, CITIES, sites=SOME)
    along = views_of(hs.project(model, CITIES, method="pca"))
    silhouettes = [view for view in along if view.title.startswith("How far apart")]
    return *views_of(few)[:1], *silhouettes


def nearest_texts(encoder: hs.Model) -> Sequence[View]:
    """Return the texts that are nearest to two queries."""
    return views_of(hs.search(encoder, QUERIES, k=4, texts=list(TOPICS)))[:2]


def full_stops(model: hs.Model) -> hs.Result:
    """Look for the tokens that excite a neuron."""
    texts = [*hs.read("plain").texts, *hs.read("cities-complete").texts]
    return hs.examples(model, "layer.20.mlp.neuron.743", texts, k=5)


def capital_lens(model: hs.Model, lens: str | hs.Lens = "logit") -> hs.Result:
    """Read a prompt with a lens, and follow its answer."""
    return hs.lens(model, CAPITALS.clean, lens=lens, target=CAPITALS.answer)


def late_attention(model: hs.Model) -> hs.Result:
    """Read a text that repeats itself, in layers with induction heads."""
    return hs.attention(model, REPEATED, layers="16-19")


def capital_contributions(model: hs.Model) -> hs.Result:
    """Split the difference of two answers to a prompt into parts."""
    return hs.contributions(model, CAPITALS.clean, CAPITALS.answer, CAPITALS.other)


def capital_tuned_lens(model: hs.Model) -> hs.Result:
    """Read the prompt with the tuned lens of examples/lenses.py: a minute to fit."""
    script = experiment("lenses")
    texts = experiment("reviews").reviews()
    return capital_lens(model, script.fit(model, "tuned", texts, script.FULL))


def unscaled_port(model: hs.Model) -> hs.Result:
    """Compare the model with a port that forgot the scale of attention in a block."""
    script = experiment("port")
    port = experiment("plain_llama").PlainLlama(model.module).eval()
    script.forget_scale(port)
    return hs.drift(model, port, script.TEXTS)


def wrong_scale(model: hs.Model) -> hs.Result:
    """Compare the model with a copy whose block 8 scales attention by 1.001."""
    port = copy.deepcopy(model.module)
    port.model.layers[7].self_attn.scaling *= 1.001
    return hs.drift(model, port, [SENTENCE, ANOTHER])


def training_run() -> hs.Result:
    """Train a small model on a few texts, and read its checkpoints with the lens."""
    texts = list(hs.read("cities-complete"))[:8]
    module: Any = tiny_model("llama", layers=6)
    tokenizer = tiny_tokenizer()
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    with TemporaryDirectory() as folder:
        members = []
        for step in range(1, 65):
            if step in (1, 4, 16, 64):
                path = Path(folder, f"step{step}")
                module.save_pretrained(path)
                tokenizer.save_pretrained(path)
                members.append(hs.Member(path, at=step))
            module(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return hs.series(members, "lens", texts)


def broken_attention(model: hs.Model) -> hs.Result:
    """Graft windows of a copy whose blocks 23 to 25 cannot read other tokens."""
    donor = hs.load()
    with torch.no_grad():
        for block in donor.module.model.layers[22:25]:
            block.self_attn.o_proj.weight.zero_()
    prompts = []
    for country, answer in ANSWERS.items():
        prompts.append((f"The capital of {country} is", answer))
    return hs.graft(model, donor, prompts, layers=5)


def number_of_subject(model: hs.Model) -> hs.Result:
    """Exchange the number of a subject, whose verb is " is" or " are"."""
    nouns = ["boy", "girl", "dog", "car", "key", "book", "friend", "teacher"]
    nouns += ["doctor", "door", "tree", "river"]
    pairs = []
    for place, noun in enumerate(nouns):
        rest = f"near the {nouns[place - 5]}"
        one, many = f"The {noun} {rest}", f"The {noun}s {rest}"
        pairs.append(hs.Interchange(one, many, " is", " are"))
        pairs.append(hs.Interchange(many, one, " are", " is"))
    return hs.variable(model, pairs, sites="layer.3,layer.15,layer.27")


def drawn_features(model: hs.Model) -> hs.Result:
    """Hold random directions against neurons and components at an MLP."""
    return hs.features(model, hs.read("plain").texts, "random", site="layer.6.mlp")


def montreal(model: hs.Model) -> hs.Result:
    """Steer two prompts along the direction between Toronto and Montreal."""
    cities = hs.read("cities-incomplete")
    texts: dict[str, list[str]] = {"Toronto": [], "Montreal": []}
    for text, label in zip(cities.texts, cities.labels, strict=True):
        texts[label].append(text)
    direction = hs.Direction.between(
        model,
        texts["Toronto"],
        texts["Montreal"],
        sites="layer.12,layer.16,layer.20,layer.24,layer.28",
    )
    prompts = [
        "Ontario's provincial capital is the city of",
        "The largest city of Quebec is",
    ]
    return hs.steer(
        model,
        prompts,
        direction,
        answers=[" Toronto", " Montreal"],
        quality=hs.read("plain").texts[:10],
        new_tokens=8,
    )


def cosines(encoder: hs.Model) -> View:
    """Return the cosine of every two texts as a grid."""
    vectors = hs.embed(encoder, list(TOPICS))
    cosine = Measure("cosine", (vectors @ vectors.T)[::-1])
    title = f"The cosine of every two texts in {encoder.name}"
    return Grid(title, TOPICS[::-1], TOPICS, (cosine,), x_name="text", y_name="text")


def _names(known: Sequence[str]) -> Sequence[str]:
    """Return the names on the command line, or all names if there are none."""
    parser = argparse.ArgumentParser(prog="python -m docs.pictures")
    parser.add_argument("names", nargs="*", help="all, if none is named")
    names: list[str] = parser.parse_args().names
    unknown = sorted({*names} - {*known})
    if unknown:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(known)}")
    return names or known


if __name__ == "__main__":
    main()
