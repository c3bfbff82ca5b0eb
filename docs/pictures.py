"""Draw the pictures of the docs again, with the default model: `make docs`.

Results that the site shows live are saved in docs/results/ beside them. The averages in
visibility-average.nc are those that examples/visibility.py wrote on a GPU.
"""

from pathlib import Path

import hiddenscope as hs
from hiddenscope.views import View, views_of
from hiddenscope.views.figures.pages import image

FOLDER = Path(__file__).with_name("pictures")
RESULTS = Path(__file__).with_name("results")
DPI = 130  # sharp on a screen, and small
SENTENCE, ANOTHER = (
    "The capital of France is Paris.",
    "The capital of Germany is Berlin.",
)
CAPITALS = hs.Contrast(
    "The capital of France is", "The capital of Germany is", " Paris", " Berlin"
)
CITIES = {name: name for name in ("cities-incomplete", "cities-complete")}
SOME = "layer.0,layer.8,layer.16,layer.24,layer.29"


def live_results(model: hs.Model) -> dict[str, hs.Result]:
    """Return the results that a page of the site shows live, by their names."""
    return {"visibility.nc": hs.visibility(model, SENTENCE)}


def views(model: hs.Model, live: dict[str, hs.Result]) -> dict[str, tuple[View, ...]]:
    """Return what each picture shows, by its name."""
    along = views_of(hs.project(model, CITIES, method="pca"))
    return {
        "norms.png": views_of(hs.profile(model, SENTENCE))[:2],
        "difference.png": views_of(hs.compare(model, SENTENCE, ANOTHER))[:2],
        "lens.png": views_of(hs.lens(model, CAPITALS.clean))[:1],
        "patch.png": views_of(hs.patch(model, CAPITALS)),
        "visibility.png": views_of(live["visibility.nc"])[:2],
        "cities.png": (
            *views_of(hs.project(model, CITIES, sites=SOME))[:1],
            *along[1:2],
        ),
        "probe.png": views_of(hs.probe(model, "cities-incomplete"))[:1],
    }


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
