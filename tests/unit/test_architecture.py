"""The file list is the architecture: this reads the source and names every place that
breaks a rule of the house.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import hiddenscope as hs
from tests.places import ROOT

HOUSE = ROOT / "src" / "hiddenscope"

# From the roof to the ground. Rooms in one row do not know one another, except the
# values: they are made of each other.
ROWS = [
    {"__main__"},
    {"cli", "testing"},
    {"app"},
    {"views"},
    {"annotations"},
    {"series"},
    {"analyses"},
    {"causes"},
    {"interface"},
    {"extract"},
    {"vectors", "directions"},
    {"store", "model", "diagnosis"},
    {"passes"},
    {"discovery"},
    {"loading"},
    {"modules"},
    {"texts", "states", "sites", "results", "linear", "measures"},
    {"files", "lazy", "versions", "workers"},
    {"catalog"},
    {"arguments"},
    {"errors", "progress"},
]
VALUES = next(row for row in ROWS if "states" in row)
# Only these may use the public names, `import hiddenscope as hs`.
ROOF = ROWS[0] | ROWS[1] | ROWS[2]
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
NAMELESS = {"utils", "util", "helpers", "helper", "core", "common", "misc"}
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Forwards are hooked in one, the registration of parts in the other.
HOOKING = {"modules.hooks", "modules.installation"}
SETTERS = {"setattr", "delattr"}
HOOK = re.compile(r"register_\w*hook")
MODES = {"no_grad", "enable_grad", "set_grad_enabled", "inference_mode"}
MOST_PARAMETERS = 7
MOST_LINES = 80
OWN_PATH = re.compile(r"""(?:^|[\s"'`(=:])/(?:home|root|work|opt|Users)/\w""")


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of a tree, which a dozen rules look at."""
    return list(ast.walk(tree))


@dataclass(frozen=True)
class Module:
    """One file of the house, read."""

    name: str
    path: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def type_checked(self) -> set[ast.AST]:
        """Everything that only type checkers run."""
        blocks = [
            node
            for node in nodes(self.tree)
            if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING"
        ]
        return {inner for block in blocks for inner in ast.walk(block)}

    @property
    def declares(self) -> bool:
        """Tell whether this is the first file of an analysis, which declares it."""
        return self.path.name == "__init__.py" and "\n@analysis(" in self.source

    def imports(self, within: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
        """Every import of ours, with what it names: `model.Model`, or nothing for the
        package itself.
        """
        place = ["hiddenscope", *self.name.split(".")]
        package = place if self.path.name == "__init__.py" else place[:-1]
        for node in nodes(within):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = package[: len(package) - node.level + 1] if node.level else []
                names = [
                    ".".join([*start, *filter(None, [node.module]), alias.name])
                    for alias in node.names
                ]
            else:
                continue
            yield from (
                (node, name.partition(".")[2])
                for name in names
                if name.split(".")[0] == "hiddenscope"
            )


def violations(house: Path) -> list[str]:
    """Every rule that a package breaks, as `module: what`."""
    paths = sorted(set(house.rglob("*.py")) - {house / "__init__.py"})
    names = [
        ".".join(path.relative_to(house).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        for path in paths
    ]
    modules = {
        name: Module(name, path) for name, path in zip(names, paths, strict=True)
    }
    # What a module names, and what it imports when it runs.
    named: dict[str, set[str]] = {name: set() for name in names}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, module in modules.items():
        for node, end in module.imports(module.tree):
            ends = end if end in modules else end.rpartition(".")[0]
            named[name].add(ends)
            if node not in module.type_checked:
                graph[name].add(ends)
        graph[name].discard(name)
    found = [
        f"{name}: {what}"
        for name, module in modules.items()
        for what in in_one_module(module)
    ]
    found += [
        f"{name}: {what}"
        for name, ends in named.items()
        for end in sorted(ends - {name})
        if (what := upward(name, end))
    ]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        found.append(" -> ".join(reversed(cycle.args[1])) + ": a cycle")
    return found


def upward(name: str, end: str) -> str | None:
    room, other = name.split(".")[0], end.split(".")[0]
    if room not in ROW_OF:
        return "a room that is not in the plan of the house"
    # Types are named in quotation marks where they would import torch.
    if other == "annotations" and room in ("analyses", "series"):
        return None
    if not other:
        return (
            None
            if room in ROOF
            else "takes a public name of the package, not the room it comes from"
        )
    if room == other:
        another = (
            room == "analyses"
            and name != "analyses"
            and name.split(".")[1] != (end.split(".") + [""])[1]
        )
        return f"an analysis imports another: {end}" if another else None
    down = (
        ROW_OF[room] < ROW_OF.get(other, -1)
        or {room, other} <= VALUES
        or room == "testing"
    )
    return None if down else f"imports {end}, which is not below it"


def in_one_module(module: Module) -> Iterator[str]:
    if NAMELESS & set(module.name.split(".")):
        yield "a name that says nothing"
    for node in nodes(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # The signature and the docstring may be as long as they must be.
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = node.body[-1].end_lineno - body[0].lineno + 1 if body else 0
            for inner in body:
                # Functions within it are counted by themselves.
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    length -= inner.end_lineno - inner.lineno + 1
            if length > MOST_LINES:
                yield f"the body of {node.name} has {length} lines, more than {MOST_LINES}"
            # The numbers of an analysis need torch, and its declaration does not.
            allowed = {f"{module.name}.compute"} if module.declares else set()
            for inner, end in module.imports(node):
                if end.rpartition(".")[0] in allowed:
                    continue
                yield f"line {inner.lineno} imports a module of ours inside a function"
        # What is made for tests watches modules as their users do.
        may_hook = module.name in HOOKING or module.name.startswith("testing")
        if not may_hook and touches_a_forward(node):
            yield f"line {node.lineno} hooks or replaces a forward: only modules/ may"
        if what := runs_foreign_code(node):
            yield f"line {node.lineno} uses {what}"
        if what := folded(node):
            yield f"line {node.lineno} holds {what}: write named steps"
    # The process of a command is ours: it silences Python's hooks as it ends.
    changes = [] if module.name == "cli.endings" else assigned_imports(module.tree)
    for line in changes:
        yield f"line {line} assigns to an attribute of an imported module"
    if not module.name.startswith(("modules.autograd", "testing")):
        for line in unguarded_modes(module.tree):
            yield (
                f"line {line} sets a mode of autograd that an interrupt can leave: put"
                " autograd.restored() before it"
            )


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def folded(node: ast.AST) -> str | None:
    """Name what a reader would have to unfold in their head."""
    if isinstance(node, ast.IfExp):
        inner = any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse))
        return "an inline conditional inside another" if inner else None
    if not isinstance(node, COMPREHENSIONS):
        return None
    if len(node.generators) > 1:
        return "a comprehension with a second for"
    parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    conditional = any(
        isinstance(inner, ast.IfExp) for part in parts for inner in ast.walk(part)
    )
    return "a comprehension with an inline conditional" if conditional else None


def dotted(node: ast.AST) -> str:
    """Return a name with its dots; empty for what is no plain name.

    `ast.unparse` of every call takes most of the time of this file.
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def assigned_imports(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that change an imported module for the whole process."""
    imported: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                imported.add(alias.asname or alias.name.split(".")[0])
    # A class or a value may be imported too; only lower-case names are modules.
    modules = {name for name in imported if name.islower()}
    for node in nodes(tree):
        target: ast.expr | None = None
        if isinstance(node, ast.Attribute) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            target = node.value
        elif isinstance(node, ast.Call) and dotted(node.func) in SETTERS:
            target = node.args[0]
        while isinstance(target, ast.Attribute):
            target = target.value
        if isinstance(target, ast.Name) and target.id in modules:
            yield node.lineno


def hides_a_hook(node: ast.AST) -> bool:
    """Tell whether a hook's name is put together, so that no search finds it."""
    is_getter = isinstance(node, ast.Call) and dotted(node.func) == "getattr"
    if not is_getter or len(node.args) < 2:
        return False
    return not isinstance(node.args[1], ast.Constant) and any(
        isinstance(part, ast.Constant) and "hook" in str(part.value)
        for part in ast.walk(node.args[1])
    )


def touches_a_forward(node: ast.AST) -> bool:
    if hides_a_hook(node):
        return True
    if isinstance(node, ast.ImportFrom):
        return any(HOOK.fullmatch(alias.name) for alias in node.names)
    if isinstance(node, ast.Attribute):
        return bool(HOOK.fullmatch(node.attr)) or (
            node.attr == "forward" and isinstance(node.ctx, ast.Store | ast.Del)
        )
    is_setattr = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in SETTERS
    )
    return is_setattr and any(
        isinstance(arg, ast.Constant) and arg.value == "forward" for arg in node.args
    )


def unguarded_modes(tree: ast.AST) -> list[int]:
    """The lines on which a mode of autograd is set outside a `with` that sets it back
    whatever interrupts.
    """
    guarded: set[int] = set()
    for node in nodes(tree):
        names = (
            [called(item.context_expr) for item in node.items]
            if isinstance(node, ast.With)
            else []
        )
        if "restored" in names:
            behind = node.items[names.index("restored") + 1 :]  # type: ignore[attr-defined]
            guarded |= {id(item.context_expr) for item in behind}
    calls = [
        node
        for node in nodes(tree)
        if isinstance(node, ast.Call) and id(node) not in guarded
    ]
    return [node.lineno for node in calls if called(node) in MODES]


def called(node: ast.AST) -> str:
    """The last name of what is called; empty for what is no call."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if is_call else ""  # type: ignore[attr-defined,no-any-return]


def runs_foreign_code(node: ast.AST) -> str | None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] + [
            getattr(node, "module", None) or ""
        ]
        return next((name for name in names if name.split(".")[0] in UNSAFE), None)
    if isinstance(node, ast.Call) and dotted(node.func) in {
        "eval",
        "exec",
        "torch.load",
    }:
        # torch then reads tensors alone, and runs nothing of the file.
        safe = any(ast.unparse(word) == "weights_only=True" for word in node.keywords)
        return None if safe else dotted(node.func)
    return None


def test_the_house_keeps_its_rules() -> None:
    assert violations(HOUSE) == []


def parameters_of(function: Callable[..., object]) -> int:
    """Count the parameters of a function, with those that `**` may hold."""
    count = 0
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            count += 1
            continue
        # Unpack[SomeTypedDict], as a string where annotations are not evaluated.
        fields = re.search(r"Unpack\[([\w.]+)\]", str(parameter.annotation))
        assert fields, f"**{name} may hold anything"
        module = sys.modules[function.__module__]
        count += len(getattr(module, fields[1].split(".")[-1]).__annotations__)
    return count


def test_a_public_function_has_at_most_seven_parameters() -> None:
    functions = {}
    for name in hs.__all__:
        value = getattr(hs, name)
        if inspect.isfunction(value):
            functions[name] = value
    counts = {name: parameters_of(function) for name, function in functions.items()}
    too_many = {name: n for name, n in counts.items() if n > MOST_PARAMETERS}
    assert too_many == {}


def test_a_package_exports_and_nothing_else() -> None:
    """The first file of a package holds imports and its list of names."""
    busy = []
    for path in HOUSE.rglob("*/__init__.py"):
        source = path.read_text("utf-8")
        # Names that need torch are exported when they are first used, and an analysis
        # is declared in the first file of its package.
        if "__getattr__ = lazy_names" in source or "\n@analysis(" in source:
            continue
        for node in ast.parse(source).body:
            is_export = isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)
            is_list = isinstance(node, ast.Assign) and "__all__" in ast.unparse(node)
            if not is_export and not is_list:
                busy.append(f"{path.relative_to(HOUSE)}:{node.lineno}")
    assert busy == []


BROKEN = [
    ("passes", "from .model import Model", "imports model, which is not below it"),
    ("model", "import hiddenscope as hs", "takes a public name of the package"),
    ("analyses.lens", "from . import patch", "an analysis imports another"),
    ("states", "from hiddenscope.results import Result", "a cycle"),
    ("model", "def f():\n    import hiddenscope.passes", "inside a function"),
    ("passes", "def f(m):\n    m.register_forward_pre_hook(f)", "hooks or replaces"),
    ("passes", "def f(m):\n    setattr(m, 'forward', f)", "hooks or replaces"),
    ("passes", "def f(m, k):\n    getattr(m, f'{k}_hook')(f)", "hooks or replaces"),
    ("loading", "from pickle import loads", "uses pickle"),
    ("loading", "import torch\nx = torch.load('x')", "uses torch.load"),
    ("loading", "x = torch.load('x', weights_only=False)", "uses torch.load"),
    ("model", "def f():\n" + "    x = 1\n" * 81, "the body of f has 81 lines"),
    ("passes", "import torch\nwith torch.no_grad():\n    pass", "a mode of autograd"),
    ("passes", "from torch import nn\nnn.Linear = None", "assigns to an attribute"),
    ("passes", "x = 1 if True else 2 if False else 3", "inside another"),
    ("passes", "x = [a for b in [] for a in b]", "with a second for"),
    ("passes", "x = [(1 if a else 2) for a in []]", "with an inline conditional"),
    ("analyses.utils", "", "a name that says nothing"),
    ("shed", "from hiddenscope.errors import Error", "not in the plan"),
]


def test_a_broken_rule_is_found(tmp_path: Path) -> None:
    for number, (module, source, what) in enumerate(BROKEN):
        found = _violations_with(tmp_path / str(number), module, source)
        assert len(found) == 1 and what in found[0], (source, found)


def _violations_with(folder: Path, module: str, source: str) -> list[str]:
    """Return what is found in a small house with one more module."""
    rooms = ("errors", "modules", "loading", "passes", "model", "states")
    plan = dict.fromkeys(rooms, "")
    plan |= {
        "results": "from hiddenscope.states import States",
        "analyses.patch": "",
        "__init__": "",
        module: source,
    }
    for name, text in plan.items():
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return violations(folder)


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    kinds = {".py", ".md", ".toml", ".txt", ".cfg", ".js", ".json", ".html"}
    folders = ("src", "tests", "labs", "docs", "examples")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in kinds
    ]
    named = [
        path
        for path in [*files, ROOT / "README.md", ROOT / "Makefile"]
        if OWN_PATH.search(path.read_text("utf-8"))
    ]
    assert named == []
