"""Show formulas as MathML, which browsers draw themselves.

Sphinx's own ways are a script from another host, or pictures that LaTeX draws. The
translator comes with docutils.
"""

from docutils import nodes
from docutils.utils.math import MathError, pick_math_environment
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.writers.html5 import HTML5Translator


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer, as Sphinx asks of an extension."""
    app.add_html_math_renderer("formulas", (_inline, None), (_display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(_mathml(node.astext(), display=False))
    raise nodes.SkipNode


def _display(translator: HTML5Translator, node: nodes.math_block) -> None:
    text = node.astext()
    environment = pick_math_environment(text)
    # The translator knows `align*` alone, and formulas of one line need none.
    if environment == "align*":
        text = f"\\begin{{align*}}{text}\\end{{align*}}"
    translator.body.append(f'<div class="formula">{_mathml(text, display=True)}</div>')
    raise nodes.SkipNode


def _mathml(text: str, *, display: bool) -> str:
    try:
        return str(tex2mathml(text, as_block=display))
    except MathError as error:
        raise ExtensionError(f"cannot read the formula {text!r}: {error}") from error
