"""Let a long name in code go on in the next line, after a dot or a bracket.

Browsers break such a name nowhere, or in the middle of a word.
"""

import re
from typing import Any

from sphinx.application import Sphinx

# Sphinx puts every word of inline code into such an element.
LONG_NAME = re.compile(r'(?<=<span class="pre">)[^<]{25,}(?=</span>)')
PLACE = re.compile(r"(?<=[.(=,/])(?=[^.(=,/)])")


def setup(app: Sphinx) -> dict[str, bool]:
    """Change every page before it is written, as Sphinx asks of an extension."""
    app.connect("html-page-context", _mark_places)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _mark_places(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    if "body" in context:
        context["body"] = LONG_NAME.sub(_with_places, context["body"])


def _with_places(name: re.Match[str]) -> str:
    return PLACE.sub("<wbr>", name[0])
