"""Draw the pictures of the docs anew, with the default model: `make docs`."""

from pathlib import Path

import hiddenscope as hs
from hiddenscope.views import View, views_of
from hiddenscope.views.figures.pages import image

FOLDER = Path(__file__).with_name("pictures")
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


def views() -> dict[str, tuple[View, ...]]:
    """What each picture shows, by its name."""
    model = hs.load()
    along = views_of(hs.project(model, CITIES, method="pca"))
    return {
        "norms.png": views_of(hs.profile(model, SENTENCE))[:2],
        "difference.png": views_of(hs.compare(model, SENTENCE, ANOTHER))[:2],
        "lens.png": views_of(hs.lens(model, CAPITALS.clean))[:1],
        "patch.png": views_of(hs.patch(model, CAPITALS)),
        "visibility.png": views_of(hs.visibility(model, SENTENCE))[:2],
        "cities.png": (
            *views_of(hs.project(model, CITIES, sites=SOME))[:1],
            *along[1:2],
        ),
        "probe.png": views_of(hs.probe(model, "cities-incomplete"))[:1],
    }


if __name__ == "__main__":
    for name, shown in views().items():
        picture = image(shown, ".png", dpi=DPI)
        (FOLDER / name).write_bytes(picture)
        print(f"Wrote docs/pictures/{name}: {len(picture) / 1000:.0f} kB")
