"""Draw the pictures of the docs anew, with the default model: `make docs`."""

from pathlib import Path

import hiddenscope as hs
from hiddenscope.views import pictures
from hiddenscope.views.figures import image

FOLDER = Path(__file__).with_name("pictures")
DPI = 130  # sharp on a screen, and small


def draw() -> dict[str, bytes]:
    """Every picture by its name."""
    model = hs.load()
    norms = hs.profile(model, "The capital of France is Paris.")
    difference = hs.compare(model, "The capital of France is Paris.", "The capital of Germany is Berlin.")
    pair = {"clean": "The capital of France is", "corrupt": "The capital of Germany is"}
    patched = hs.patch(model, **pair, answer=" Paris", other=" Berlin")
    seen = hs.visibility(model, "The capital of France is Paris.")
    shown = {
        "patch.png": pictures(patched),
        "norms.png": pictures(norms)[:2],
        "difference.png": pictures(difference)[:2],
    }
    shown["visibility.png"] = pictures(seen)[:2]
    return {name: image(views, ".png", dpi=DPI) for name, views in shown.items()}


if __name__ == "__main__":
    for name, picture in draw().items():
        (FOLDER / name).write_bytes(picture)
        print(f"Wrote docs/pictures/{name}: {len(picture) / 1000:.0f} kB")
