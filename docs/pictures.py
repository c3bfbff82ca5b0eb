"""Draw the pictures of the docs again, with the default model: `make docs`.

Results that the site shows live are saved in docs/results/ beside them. The averages in
visibility-average.nc are those that examples/visibility.py wrote on a GPU.
"""

import copy
import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch

import hiddenscope as hs
from hiddenscope.views import Grid, Measure, View, views_of
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


def live_results(model: hs.Model) -> dict[str, hs.Result]:
    """Return the results that a page of the site shows live, by their names."""
    return {
        "visibility.nc": hs.visibility(model, SENTENCE),
        "compare.nc": hs.compare(model, SENTENCE, ANOTHER),
        "lens.nc": hs.lens(model, CAPITALS.clean, target=CAPITALS.answer),
        "patch.nc": hs.patch(model, CAPITALS),
        "drift.nc": wrong_scale(model),
        "steer.nc": montreal(model),
        "cluster.nc": hs.cluster(hs.load("minilm"), list(TOPICS), smallest=3),
        "two-sentences-patch.nc": hs.patch(model, CAPITALS, layers=0),
        "cities.nc": experiment("cities").pictured(model),
        "steering.nc": experiment("steering").choose_site(model),
    }


def experiment(name: str) -> ModuleType:
    """Return the script of an experiment, which computes what its page shows."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def views(model: hs.Model, live: dict[str, hs.Result]) -> dict[str, tuple[View, ...]]:
    """Return what each picture shows, by its name."""
    along = views_of(hs.project(model, CITIES, method="pca"))
    encoder = hs.load("minilm")
    nearest = hs.search(encoder, QUERIES, k=4, texts=list(TOPICS))
    return {
        "anatomy.png": views_of(hs.anatomy(model))[:1],
        "norms.png": views_of(hs.profile(model, SENTENCE))[:2],
        "difference.png": views_of(live["compare.nc"])[:2],
        "drift.png": views_of(live["drift.nc"])[1:2],
        "start.png": views_of(hs.lens(model, CHILD))[:1],
        "lens.png": views_of(live["lens.nc"])[:1],
        "patch.png": views_of(live["patch.nc"]),
        "graft.png": views_of(broken_attention(model))[:1],
        "steer.png": views_of(live["steer.nc"])[:1],
        "visibility.png": views_of(live["visibility.nc"])[:2],
        "cities.png": (
            *views_of(hs.project(model, CITIES, sites=SOME))[:1],
            *along[1:2],
        ),
        "probe.png": views_of(hs.probe(model, "cities-incomplete"))[:1],
        "embed.png": (cosines(encoder),),
        "search.png": views_of(nearest)[:2],
        "cluster.png": views_of(live["cluster.nc"])[:1],
    }


def wrong_scale(model: hs.Model) -> hs.Result:
    """Compare the model with a copy whose block 8 scales attention by 1.001."""
    port = copy.deepcopy(model.module)
    port.model.layers[7].self_attn.scaling *= 1.001
    return hs.drift(model, port, [SENTENCE, ANOTHER])


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
        answers=[" Montreal", " Toronto"],
        quality=hs.read("plain").texts[:10],
        new_tokens=8,
    )


def cosines(encoder: hs.Model) -> View:
    """Return the cosine of every two texts as a grid."""
    vectors = hs.embed(encoder, list(TOPICS))
    cosine = Measure("cosine", (vectors @ vectors.T)[::-1])
    title = f"The cosine of every two texts in {encoder.name}"
    return Grid(title, TOPICS[::-1], TOPICS, (cosine,), x_name="text", y_name="text")


if __name__ == "__main__":
    default = hs.load()
    saved = live_results(default)
    for name, result in saved.items():
        result.save(RESULTS / name)
        print(f"Wrote docs/results/{name}")
    for name, shown in views(default, saved).items():
        picture = image(shown, ".png", dpi=DPI)
        (FOLDER / name).write_bytes(picture)
        print(f"Wrote docs/pictures/{name}: {len(picture) / 1000:.0f} kB")
