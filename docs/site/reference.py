"""Write the pages of the API reference from the docstrings of the public names.

The pages exist in the site alone. A copy in the repository would repeat docstrings,
which are read beside their code there, and whose examples the tests run.
"""

import inspect
import re
from collections.abc import Iterator
from types import FunctionType, ModuleType

import hiddenscope as hs
from docs.site.signatures import signature_of
from docs.site.structure import NameGroup, TypeName

# Names in signatures are looked up here, and become links.
INSIDE = ":::{py:currentmodule} hiddenscope\n:::\n"
TYPES_TITLE = "What arguments may be"
TYPES_LINE = "Signatures use short names for what a function takes. They say what you may give; there is nothing to import."
EXAMPLE = re.compile(r"(?:^ *>>> .*\n?(?:^ *\S.*\n?)*)", re.MULTILINE)


def reference_page(group: NameGroup) -> str:
    """Return the page of a group of names as MyST Markdown."""
    parts = [f"# {group.title}\n", INSIDE, f"{group.line}\n"]
    for name in group.names:
        value = getattr(hs, name)
        if isinstance(value, ModuleType):
            parts += _module(value)
        else:
            parts.append(_entry(name, value))
    return "\n".join(parts)


def types_page(types: list[TypeName]) -> str:
    """Return the page that says what the short names in signatures stand for."""
    parts = [f"# {TYPES_TITLE}\n", INSIDE, f"{TYPES_LINE}\n"]
    for entry in types:
        parts.append(_directive("class", entry.name, "", entry.line))
    return "\n".join(parts)


def _module(module: ModuleType) -> Iterator[str]:
    """Describe the classes that a module defines."""
    yield f"```text\n{inspect.cleandoc(module.__doc__ or '').split('>>>')[0]}\n```\n"
    word = module.__name__.removeprefix("hiddenscope.")
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            yield _entry(f"{word}.{name}", value)


def _entry(name: str, value: object) -> str:
    if not inspect.isclass(value):
        return _directive("function", name, signature_of(value), _text(value))
    members = []
    # What a class inherits from other libraries is described there.
    for word, member in vars(value).items():
        if not word.startswith("_"):
            members += _member(word, member)
    body = "\n".join([_text(value), *members])
    # Fences nest when the outer one is longer.
    return _directive("class", name, signature_of(value), body, fence=":" * 5)


def _member(name: str, member: object) -> Iterator[str]:
    """Describe a method or a property that has a docstring."""
    if isinstance(member, property) and member.__doc__:
        yield _directive("property", name, "", _text(member))
    elif isinstance(member, classmethod | staticmethod) and member.__doc__:
        kind = type(member).__name__
        signature = signature_of(member.__func__)
        yield _directive("method", name, signature, _text(member), option=kind)
    elif isinstance(member, FunctionType) and member.__doc__:
        yield _directive("method", name, signature_of(member), _text(member))


def _directive(
    kind: str, name: str, signature: str, body: str, *, option: str = "", fence=":::"
) -> str:
    options = f":{option}:\n" if option else ""
    head = f"{fence}{{py:{kind}}} {name}{signature}\n{options}"
    return f"{head}\n{body}\n{fence}\n"


def _text(value: object) -> str:
    """Return a docstring as Markdown: its examples become blocks of code."""
    text = inspect.cleandoc(value.__doc__ or "")
    return EXAMPLE.sub(_example, text)


def _example(match: re.Match[str]) -> str:
    return f"\n```pycon\n{inspect.cleandoc(match[0])}\n```\n"
