"""Draw the pictures of the docs anew, with the default model: `make docs`."""

from pathlib import Path

import hiddenscope as hs
from hiddenscope.views import pictures
from hiddenscope.views.figures import image

FOLDER = Path(__file__).with_name("pictures")
DPI = 130  # sharp on a screen, and small


def draw() -> dict[str, bytes]:
    """Every picture by its name."""
    norms = hs.profile(hs.load(), "The capital of France is Paris.")
    return {"norms.png": image(pictures(norms), ".png", dpi=DPI)}


if __name__ == "__main__":
    for name, picture in draw().items():
        (FOLDER / name).write_bytes(picture)
        print(f"Wrote docs/pictures/{name}: {len(picture) / 1000:.0f} kB")
