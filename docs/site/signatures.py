"""Write signatures as their authors wrote them.

`inspect.signature` expands the aliases of types: `Texts` becomes a union of nine types.
The source has the short name, and the page of types says what it stands for.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args, get_origin

# Other names are known without their module: `nn.Module` is shown as `Module`.
UNCHANGED = ("torch.dtype", "torch.device")
# An object that is made to tell a default from None has no name worth showing.
HIDDEN_DEFAULT = "..."


@dataclass(frozen=True)
class Written:
    """The annotations of a function, by the names of its parameters."""

    parameters: dict[str, str]
    returns: str


def signature_of(value: object) -> str:
    """Return the signature of a function or a class, as `(text: str = "") -> int`."""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except ValueError:
        return ""
    written = written_annotations(value)
    parts = []
    kind = None
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls") and not parts:
            continue
        if _begins_keywords(kind, parameter.kind):
            parts.append("*")
        kind = parameter.kind
        parts.append(_parameter(parameter, written))
    returns = ""
    if written.returns and not inspect.isclass(value):
        returns = f" -> {written.returns}"
    return f"({', '.join(parts)}){returns}"


def _begins_keywords(before: object, kind: object) -> bool:
    """Tell whether a bare star stands before the first parameter of this kind."""
    first = kind == inspect.Parameter.KEYWORD_ONLY
    starred = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return first and before not in starred


def _parameter(parameter: inspect.Parameter, written: Written) -> str:
    text = parameter.name
    if parameter.kind == inspect.Parameter.VAR_POSITIONAL:
        text = f"*{text}"
    if parameter.kind == inspect.Parameter.VAR_KEYWORD:
        text = f"**{text}"
    annotation = written.parameters.get(parameter.name, "")
    if annotation:
        text += f": {annotation}"
    if parameter.default is inspect.Parameter.empty:
        return text
    default = repr(parameter.default)
    if " at 0x" in default or default.startswith("<"):
        default = HIDDEN_DEFAULT
    return f"{text} = {default}" if annotation else f"{text}={default}"


@cache
def written_annotations(value: object) -> Written:
    """Return the annotations of a function, or of a class's fields, as text."""
    node = _definition(value)
    if isinstance(node, ast.ClassDef):
        return Written(dict(_fields(value)), "")
    names = _names_of(value)
    parameters = {}
    returns = ""
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += filter(None, [arguments.vararg, arguments.kwarg])
        for argument in every:
            parameters[argument.arg] = _short(argument.annotation, names)
        returns = _short(node.returns, names)
    return Written(parameters, returns)


def _fields(value: object) -> Iterator[tuple[str, str]]:
    """Yield the fields of a class and its parents, or the parameters of `__init__`."""
    assert inspect.isclass(value)
    for parent in reversed(value.__mro__):
        node = _definition(parent)
        names = _names_of(parent)
        if not isinstance(node, ast.ClassDef):
            continue
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                yield line.target.id, _short(line.annotation, names)
            if isinstance(line, ast.FunctionDef) and line.name == "__init__":
                for argument in [*line.args.args, *line.args.kwonlyargs]:
                    yield argument.arg, _short(argument.annotation, names)


def _definition(value: object) -> ast.stmt | None:
    """Return the definition of a function or a class in its source."""
    try:
        source = inspect.getsource(inspect.unwrap(value))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None
    return ast.parse(textwrap.dedent(source)).body[0]


def _names_of(value: object) -> dict[str, object]:
    """Return what the names in the module of a function or a class stand for."""
    return vars(sys.modules[inspect.unwrap(value).__module__])  # type: ignore[arg-type]


def _short(annotation: ast.expr | None, names: Mapping[str, object]) -> str:
    """Return an annotation without the modules of its names, and without quotes."""
    if annotation is None:
        return ""
    # What is asked of a parameter is for forms and commands: Annotated[int, ask(...)].
    match annotation:
        case ast.Subscript(ast.Name("Annotated"), ast.Tuple([bare, *_])):
            return _short(bare, names)
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return ast.unparse(_ShortNames(names).visit(annotation))


class _ShortNames(ast.NodeTransformer):
    """Drop modules, and spell out aliases that name a few words."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self.names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if ast.unparse(node) in UNCHANGED:
            return node
        return ast.copy_location(ast.Name(node.attr), node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        alias = self.names.get(node.id)
        if get_origin(alias) is Literal:
            words = ", ".join(map(repr, get_args(alias)))
            return ast.parse(f"Literal[{words}]", mode="eval").body
        return node
