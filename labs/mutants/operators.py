"""The faults that a line of a function can have, one small change of its text each.

Nothing is changed outside the bodies of functions, nor in strings, in what an error
says, or in an `assert`.

>>> source = "def first(values, n):\\n    return values[:n] if n > 0 else None\\n"
>>> [fault.what for fault in faults_in(source) if fault.kind == "comparison"]
['`>` to `>=`']
"""

import ast
import re
from dataclasses import dataclass
from itertools import pairwise

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
}
NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "argmin": "argmax",
    "argmax": "argmin",
}
# Their first argument is an axis, if it is a number.
REDUCTIONS = {
    *("sum", "mean", "median", "std", "var", "norm", "cumsum", "logsumexp", "softmax"),
    *("log_softmax", "max", "min", "amax", "amin", "argmax", "argmin", "any", "all"),
}
AXES = {0: "1", 1: "0", 2: "1"}
# What `zip` refuses, how files are spelled, and texts of the command line.
LEFT = {"strict", "encoding", "errors", "help", "stacklevel"}
# Texts and lists: a sign between them is no arithmetic.
NOT_NUMBERS = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, ast.Dict)


@dataclass(frozen=True)
class Fault:
    """A change of some bytes of a source, from `start` to `end`, to `text`."""

    kind: str
    what: str
    function: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """Return the source with the fault."""
        content = source.encode()
        changed = content[: self.start] + self.text.encode() + content[self.end :]
        return changed.decode()


def faults_in(source: str) -> list[Fault]:
    """Return every fault that the functions of a source can have."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return finder.faults


class _Finder(ast.NodeVisitor):
    """Walk the bodies of functions, and note what can be changed there."""

    def __init__(self, source: str) -> None:
        self.content = source.encode()
        lines = self.content.splitlines(keepends=True)
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))
        self.names: list[str] = []
        self.depth = 0
        self.faults: list[Fault] = []

    # What is walked.

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Walk the methods."""
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Walk the body, without its docstring, decorators and signature."""
        self.names.append(node.name)
        self.depth += 1
        for statement in node.body:
            self.visit(statement)
        self.depth -= 1
        self.names.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Walk the body as that of any function."""
        self.visit_FunctionDef(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave what an error says."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave what a reader is told to rely on."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts; before Python 3.12 the places inside are not known either."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Walk the value alone."""
        if node.value is not None:
            self.visit(node.value)

    # What is changed.

    def visit_Compare(self, node: ast.Compare) -> None:
        """Flip each comparison."""
        operands = [node.left, *node.comparators]
        for (left, right), operator in zip(pairwise(operands), node.ops, strict=True):
            old, new = COMPARISONS[type(operator)]
            self._between("comparison", left, right, old, new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Exchange `and` and `or`."""
        old, new = "and", "or"
        if isinstance(node.op, ast.Or):
            old, new = new, old
        for left, right in pairwise(node.values):
            self._between("logic", left, right, old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Exchange the signs of sums and products of numbers."""
        texts = isinstance(node.left, NOT_NUMBERS) or isinstance(
            node.right, NOT_NUMBERS
        )
        for side in (node.left, node.right):
            if isinstance(side, ast.Constant) and isinstance(side.value, str | bytes):
                texts = True
        if type(node.op) in ARITHMETIC and not texts:
            old, new = ARITHMETIC[type(node.op)]
            self._between("arithmetic", node.left, node.right, old, new)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Exchange its sign, or leave the statement out."""
        self._add("statement", node, "pass", f"`{self._text(node)}` left out")
        if type(node.op) in ARITHMETIC and not isinstance(node.value, NOT_NUMBERS):
            old, new = ARITHMETIC[type(node.op)]
            self._between("arithmetic", node.target, node.value, f"{old}=", f"{new}=")
        self.visit(node.value)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drop `not`."""
        if isinstance(node.op, ast.Not):
            operand = self._text(node.operand)
            self._add("not", node, f"({operand})", "`not` dropped")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Exchange the arms."""
        if node.orelse:
            test = self._text(node.test)
            self._add("arms", node.test, f"not ({test})", "arms of `if` exchanged")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Exchange the arms."""
        test = self._text(node.test)
        self._add("arms", node.test, f"(not ({test}))", "arms of `if` exchanged")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Leave a call out whose value nobody takes."""
        if isinstance(node.value, ast.Call):
            self._add("statement", node, "pass", f"`{self._text(node)}` left out")
        self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        """Move each bound by one."""
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                text = self._text(bound)
                self._add("bound", bound, f"({text}) + 1", f"`{text}` to `{text} + 1`")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Drop a keyword, and exchange an axis or the name of a function."""
        name: ast.expr | None = node.func
        word = ""
        if isinstance(name, ast.Attribute):
            word = name.attr
        elif isinstance(name, ast.Name):
            word = name.id
        if word in NAMES:
            end = self._end(node.func)
            start = end - len(word)
            self._note("name", node.func, start, end, NAMES[word])
        self.visit(node.func)
        for place, argument in enumerate(node.args):
            is_axis = word in REDUCTIONS and place == 0
            if not (is_axis and self._axis(argument)):
                self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg in LEFT:
                continue
            if keyword.arg is not None:
                self._drop(keyword)
            if keyword.arg in ("axis", "dim") and self._axis(keyword.value):
                continue
            self.visit(keyword.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change a number or a flag."""
        value = node.value
        if isinstance(value, bool):
            self._add("flag", node, str(not value))
        elif isinstance(value, int):
            self._add("integer", node, str(value + 1))
            if value > 0:
                self._add("integer", node, str(value - 1))
        elif isinstance(value, float):
            self._add("float", node, repr(float(f"{value * 1.1 or 0.1:.6g}")))

    def _axis(self, node: ast.expr) -> bool:
        """Note another axis, and tell whether the expression is one."""
        is_last = isinstance(node, ast.UnaryOp) and self._text(node) == "-1"
        if is_last:
            self._add("axis", node, "0")
            return True
        value = node.value if isinstance(node, ast.Constant) else None
        if type(value) is int and value in AXES:
            self._add("axis", node, AXES[value])
            return True
        return False

    def _drop(self, keyword: ast.keyword) -> None:
        """Note a call without a keyword, and without its comma."""
        start, end = self._start(keyword), self._end(keyword)
        text = self.content[start:end].decode()
        after = re.match(rb"\s*,\s*", self.content[end:])
        before = re.search(rb",\s*$", self.content[:start])
        if after:
            end += after.end()
        elif before:
            start = before.start()
        short = " ".join(text.split())
        self._note("keyword", keyword, start, end, "", f"`{short}` dropped")

    def _between(
        self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> None:
        """Note another operator between two operands."""
        start, end = self._end(left), self._start(right)
        between = self.content[start:end].decode()
        pattern = r"\s+".join(map(re.escape, old.split()))
        found = re.search(rf"(?<!\w){pattern}(?!\w)", between)
        # A comment may hold anything.
        if found is None or "#" in between:
            return
        place = start + len(between[: found.start()].encode())
        self._note(kind, left, place, place + len(found[0].encode()), new)

    def _add(self, kind: str, node: ast.AST, text: str, what: str = "") -> None:
        self._note(kind, node, self._start(node), self._end(node), text, what)

    def _note(
        self, kind: str, node: ast.AST, start: int, end: int, text: str, what: str = ""
    ) -> None:
        # What stands outside functions are declarations.
        if not self.depth:
            return
        old = self.content[start:end].decode()
        fault = Fault(
            kind=kind,
            what=what or f"`{old}` to `{text}`",
            function=".".join(self.names),
            line=self.content[:start].count(b"\n") + 1,
            start=start,
            end=end,
            text=text,
        )
        self.faults.append(fault)

    def _text(self, node: ast.AST) -> str:
        text = self.content[self._start(node) : self._end(node)].decode()
        return " ".join(text.split()) if "\n" in text else text

    def _start(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset
