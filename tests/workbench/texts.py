"""Texts of a store: ordinary ones, one of them twice, and some that are hostile to
pages.
"""

HOSTILE = (
    '<img src=x onerror="alert(1)"><script>alert(2)</script>',
    "\u202eturned\u202c \u0007 bell \u2028 line",
    "’quoted` && $(echo) %s {0}",
)
TEXTS = (
    *HOSTILE,
    *(f"The rest of number {k} is here." for k in range(42)),
    "The rest of number 3 is here.",
)
