"""The colours of the views, for whatever draws them outside a browser; `static/colour.js` has the same.

>>> SEQUENTIAL["light"][0], len(DIVERGING["dark"])
('#faf7e1', 9)
"""

from typing import Final

SEQUENTIAL: Final = {
    "light": ("#faf7e1", "#cce3bc", "#89d1b1", "#51b8ac", "#049daa", "#037ea0", "#005f97", "#133f87", "#1f206d"),
    "dark": ("#191d2f", "#243159", "#284886", "#136a98", "#148ba1", "#23aca6", "#5cca9f", "#abe18d", "#f8f085"),
}
"""From little to much, evenly spaced; lightness runs evenly, so order is seen with any eyes."""

DIVERGING: Final = {
    "light": ("#004b97", "#3274c4", "#74a0d8", "#b3cbea", "#f7f6f1", "#e6bfae", "#cf8a6b", "#b55320", "#803100"),
    "dark": ("#77c7fe", "#459cd4", "#3c7194", "#30495a", "#232321", "#56402e", "#8d6039", "#c78142", "#f8aa66"),
}
"""From below zero to above, evenly spaced, zero in the middle."""

CLASSES: Final = {
    "light": ("#0072b2", "#d55e00", "#009e73", "#b8569a", "#c98a00", "#3ba3dd", "#7a6a00", "#6b6b6b"),
    "dark": ("#4ba3dc", "#f08343", "#2fc49a", "#d98cbf", "#e8b13d", "#8fd0f5", "#d6ca5a", "#a8a8a8"),
}
"""For labels and series, in this order; after eight they come round again."""
