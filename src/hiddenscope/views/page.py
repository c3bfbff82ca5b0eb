"""Views as one HTML document that needs nothing else: no network, no server, no other
file.

>>> from hiddenscope.results.pictures import Lines, Series
>>> norms = Lines("Norms", ("layer.0", "layer.1"), (Series("norm", [1.0, 2.5]),))
>>> html = document([norms], "A first look")
>>> html.startswith("<!doctype html>"), "<h1>A first look</h1>" in html
(True, True)
>>> "http://" in html.replace(XML_NAME, "")
False
"""

import base64
import hashlib
import html
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain, groupby, zip_longest

from hiddenscope.errors import StatesError
from hiddenscope.results.pictures import View
from hiddenscope.views.payload import pack

# An XML namespace, which is never fetched.
XML_NAME = "http://www.w3.org/2000/svg"

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+\.js)";\n', re.MULTILINE)
_OTHER_IMPORT = re.compile(
    r"^(?:import|export \*|export \{|export default)\b"
    r"|\bimport\((?!\"\./\w+\.js\"\)\.)",
    re.MULTILINE,
)
_NAME = re.compile(
    r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE
)
# These change the direction of the line, so that a text could look like another.
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# These show nothing, or are no characters at all.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]"
)


def document(views: Sequence[View], title: str, prose: Sequence[str] = ()) -> str:
    """Return a page with the views in order; `prose[i]` comes before view i, and one
    more may follow the last.

    Prose is plain text: blank lines separate paragraphs, a line that begins with `# `
    is a heading, lines that begin with `- ` are a list, and words between backticks are
    code. Nothing in it is markup. Without a title, the title of the first view names
    the page.
    """
    if len(prose) > len(views) + 1:
        raise StatesError(
            f"Cannot make the page {title!r}",
            f"there are {len(prose)} pieces of prose for {len(views)} views",
            "Give one for each view, and at most one after the last.",
        )
    texts = [paragraphs(text) for text in prose]
    pictures = [placed(view, place) for place, view in enumerate(views)]
    pairs = zip_longest(texts, pictures, fillvalue="")
    return assembled(views, title, "".join(chain.from_iterable(pairs)))


def assembled(views: Sequence[View], title: str, body: str, contents: str = "") -> str:
    """Return a page of trusted markup, with the script that draws the views and the
    numbers that they hold.
    """
    script, style = join_scripts("main.js"), _static("style.css")
    name = title
    if not name and views:
        name = views[0].title
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            '<meta http-equiv="Content-Security-Policy"',
            f' content="{policy(script, style)}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            '<link rel="icon" href="data:,">\n',
            f"<title>{html_text(name)}</title>\n",
            f"<style>{style}</style>\n</head>\n",
            f"<body>\n{contents}<main>\n",
            f"<h1>{html_text(title)}</h1>\n" if title else "",
            body,
            "<noscript><p>The pictures here are drawn by JavaScript,",
            " which is off.</p></noscript>\n</main>\n",
            '<script type="application/octet-stream" id="payload">',
            f"{pack(views)}</script>\n",
            f'<script type="module">{script}</script>\n</body>\n</html>\n',
        ]
    )


def frame(page: str, height: int = 640) -> str:
    """Return a document for a notebook's output: it may run its script and offer files,
    and cannot reach anything around it.

    It sends its height to the script beside it; where scripts are off, `height` stays.

    >>> 'sandbox="allow-scripts allow-downloads"' in frame("<!doctype html>")
    True
    """
    # A notebook may hold several outputs, and each script must find its own frame.
    name = f"hiddenscope-{secrets.token_hex(6)}"
    return (
        f'<iframe id="{name}" title="hiddenscope view"'
        ' sandbox="allow-scripts allow-downloads"'
        f' width="100%" height="{int(height)}" frameborder="0"'
        f' srcdoc="{html.escape(page, quote=True)}"></iframe>\n'
        "<script>addEventListener('message', (event) => { "
        f"const frame = document.getElementById('{name}'); "
        "if (!frame || event.source !== frame.contentWindow"
        " || event.data?.hiddenscope !== 'height') return; "
        "const height = Number(event.data.height); "
        "if (height > 0 && height < 20000) frame.height = String(Math.ceil(height));"
        " });</script>"
    )


def policy(script: str, style: str) -> str:
    """Return what the page may do: run this script, use this style, show images that it
    made itself, and nothing else.
    """
    # Hashes allow just this script and style: nothing that a text may smuggle in runs.
    return (
        "default-src 'none';"
        f" script-src '{digest(script)}'; style-src '{digest(style)}';"
        " img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def digest(text: str) -> str:
    """Return the hash by which a content security policy names an inline text."""
    sha256 = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(sha256).decode('ascii')}"


@cache
def join_scripts(entry: str) -> str:
    """Join the ES modules that an entry needs, in the order of their imports, to one
    script.

    Joining works because modules import only named things from their own folder, and no
    two of them share a top-level name. Both are checked here.
    """
    texts: dict[str, str] = {}
    _gather(entry, texts, ())
    # In one script, the second of two equal names would replace the first.
    owners: dict[str, str] = {}
    for module, text in texts.items():
        for name in _NAME.findall(text):
            if owners.setdefault(name, module) != module:
                raise StatesError(
                    f"Cannot put {name} of {module} on a page",
                    f"{owners[name]} has that name too",
                    "Give one of them another name.",
                )
    script = "".join(texts.values())
    return re.sub(r"^export ", "", script, flags=re.MULTILINE)


def _gather(module: str, texts: dict[str, str], above: tuple[str, ...]) -> None:
    if module in texts:
        return
    if module in above:
        raise StatesError(
            f"{module} imports itself",
            " -> ".join([*above, module]),
            "Break the cycle.",
        )
    source = _static(module)
    for _, other in _IMPORT.findall(source):
        _gather(other, texts, (*above, module))
    text = _IMPORT.sub("", source)
    unsupported = _OTHER_IMPORT.search(text)
    if unsupported:
        raise StatesError(
            f"Cannot put {module} on a page",
            f"it has {unsupported[0]!r}",
            "Import named things, on one line.",
        )
    texts[module] = text


@cache
def _static(name: str) -> str:
    return (files("hiddenscope.views") / "static" / name).read_text("utf-8")


def placed(view: View, place: int) -> str:
    """Return the element in which the script draws a view, by its place on the page."""
    kind = type(view).__name__.lower()
    return f'<section data-view="{place}" class="{kind}"></section>\n'


def paragraphs(text: str) -> str:
    """Return prose as markup: paragraphs, headings, lists and code."""
    if not text.strip():
        return ""
    return f'<div class="prose">\n{"".join(prose_markup(text))}</div>\n'


def prose_markup(text: str) -> Iterator[str]:
    """Yield the pieces of prose as markup."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        for prefix, lines in groupby(paragraph.splitlines(), key=_prefix):
            if prefix == "# ":
                yield from (f"<h2>{inline(line[2:])}</h2>\n" for line in lines)
            elif prefix == "- ":
                items = [f"<li>{inline(line[2:])}</li>" for line in lines]
                yield f"<ul>{''.join(items)}</ul>\n"
            else:
                yield f"<p>{inline(' '.join(lines))}</p>\n"


def _prefix(line: str) -> str:
    return line[:2] if line[:2] in ("# ", "- ") else ""


def inline(text: str) -> str:
    """Return one line of prose as markup."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html_text(text))


def html_text(text: str) -> str:
    """Return text for HTML: no markup, no invisible characters, and none that change
    the direction of the line.

    >>> html_text("<b>" + chr(0x202E))
    '&lt;b&gt;‹U+202E›'
    """
    visible = _UNSEEN.sub(_marked, _BIDI.sub(_marked, text))
    return html.escape(visible, quote=True)


def _marked(match: re.Match[str]) -> str:
    return f"‹U+{ord(match[0]):04X}›"
