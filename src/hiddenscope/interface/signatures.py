"""The signatures of analyses, read from their source: importing an analysis would
import torch.

Commands (`cli/generated.py`) and the requests of the workbench (`app/schemas.py`) are
made from these.

>>> [parameter.name for parameter in parameters_of("hiddenscope.analyses.anatomy.anatomy", "anatomy")]
['model']
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function, as its source declares it; a default that is no
    literal is None here.
    """

    name: str
    type: ast.expr
    positional: bool
    required: bool
    default: Any = None

    @property
    def names(self) -> set[str]:
        """The names that its type is made of."""
        return {node.id for node in ast.walk(self.type) if isinstance(node, ast.Name)}


def parameters_of(module: str, function: str) -> Iterator[Parameter]:
    """The parameters of a function, from its source."""
    node = next(
        node
        for node in _source(module).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    positional, named = node.args.args, node.args.kwonlyargs
    defaults = (
        [None] * (len(positional) - len(node.args.defaults))
        + node.args.defaults
        + node.args.kw_defaults
    )
    for place, (argument, default) in enumerate(
        zip([*positional, *named], defaults, strict=True)
    ):
        type_ = argument.annotation or ast.Name("str")
        if isinstance(type_, ast.Constant):  # a type in quotes
            type_ = ast.parse(str(type_.value), mode="eval").body
        yield Parameter(
            argument.arg,
            type_,
            place < len(positional),
            default is None,
            _literal(default),
        )


def words_of(type_: ast.expr, module: str) -> Iterator[str]:
    """The words of a `Literal`, or of a name that stands for one here or in the module
    that it is imported from.

    >>> list(words_of(ast.Name("Into"), "hiddenscope.analyses.patch.patch"))
    ['corrupt', 'clean']
    """
    for node in ast.walk(type_):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Name) and (alias := _alias(node.id, module)):
            yield from words_of(*alias)


def _alias(name: str, module: str) -> tuple[ast.expr, str] | None:
    for node in _source(module).body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == name
        ):
            literal = node.value is not None and "Literal" in ast.unparse(node.value)
            return (node.value, module) if literal and node.value is not None else None
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("hiddenscope.")
        ):
            for imported in node.names:
                if (imported.asname or imported.name) == name:
                    return _alias(imported.name, node.module)
    return None


def _literal(default: ast.expr | None) -> Any:
    try:
        return None if default is None else ast.literal_eval(default)
    except ValueError:  # a constant of its module
        return None


@cache
def _source(module: str) -> ast.Module:
    """The source of a module of ours; `importlib` would import the packages that it is
    in.
    """
    path = Path(__file__).parents[2].joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text("utf-8"))
