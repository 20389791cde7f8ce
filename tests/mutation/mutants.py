"""Small faults to put into a source file, one at a time: the mutants of mutation testing.

A mutant changes one place of the text, so that comments and formatting stay and the difference is
a line or two. `mutants_of` finds the places with `ast` and yields every mutant in order of lines.

What is left alone, since no test of behaviour should notice it: annotations, docstrings, text,
log calls, `assert`, `zip(strict=)`, `__all__`, `__slots__`, decorators of classes, and the numbers
that are defaults of annotated class fields (settings: a test that pins them would only repeat
them). Expressions within f-strings are left alone too, because `ast` has no exact positions for
them before Python 3.12.

Knows nothing of tests or processes.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "|"),
}
OPPOSITE_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGGERS = {"log", "_log", "logger", "_logger", "LOG", "LOGGER"}
UNSEEN_NAMES = {"__all__", "__slots__"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed place. `first_line` to `last_line` is the statement (of a compound one its head)
    that runs when the place does; `is_import_time` when it runs on import, not in a call.
    """

    line: int
    operator: str
    source: str
    before: str
    after: str
    first_line: int
    last_line: int
    is_import_time: bool


def mutants_of(source: str) -> list[Mutant]:
    """Every mutant of a module's text, each text once."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    unique: dict[str, Mutant] = {}
    for mutant in finder.found:
        unique.setdefault(mutant.source, mutant)
    return sorted(unique.values(), key=lambda mutant: mutant.line)


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.found: list[Mutant] = []
        self._text = source.encode()
        self._starts = [0]
        for line in self._text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._statement: ast.stmt | None = None
        self._depth = 0  # of functions around the present node
        self._is_field = False  # within the default of an annotated class field

    # Positions. `ast` counts columns in bytes of UTF-8.

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _change(self, operator: str, start: int, end: int, new: str) -> None:
        text = self._text[:start] + new.encode() + self._text[end:]
        source = text.decode()
        try:
            ast.parse(source)
        except SyntaxError:
            return
        first = self._text.count(b"\n", 0, start)
        last = self._text.count(b"\n", 0, end)
        old_lines, new_lines = self._text.decode().splitlines(), source.splitlines()
        num_after = len(new_lines) - len(old_lines) + last + 1
        statement = self._statement
        assert statement is not None
        head_end = statement.end_lineno or statement.lineno
        body = getattr(statement, "body", None) or getattr(statement, "cases", None)
        if body:
            inner = body[0].pattern.lineno if isinstance(body[0], ast.match_case) else None
            head_end = max(statement.lineno, (inner or body[0].lineno) - 1)
        self.found.append(
            Mutant(
                line=first + 1,
                operator=operator,
                source=source,
                before="\n".join(old_lines[first : last + 1]),
                after="\n".join(new_lines[first:num_after]),
                first_line=statement.lineno,
                last_line=max(head_end, last + 1) if not body else head_end,
                is_import_time=self._depth == 0,
            )
        )

    def _swap_token(self, operator: str, start: int, end: int, old: str, new: str) -> None:
        """Replace the operator between two operands: only brackets and comments stand beside it."""
        pattern = r"\s+".join(map(re.escape, old.split()))
        gap = self._text[start:end].decode()
        gap = re.sub(r"#[^\n]*", lambda comment: " " * len(comment.group().encode()), gap)
        found = re.search(pattern, gap)
        if found is not None:
            self._change(operator, start + found.start(), start + found.end(), new)

    # Statements.

    def visit(self, node: ast.AST) -> None:
        before = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node
            self._delete(node)
        super().visit(node)
        self._statement = before

    def _delete(self, node: ast.stmt) -> None:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        is_set = any(isinstance(t, ast.Attribute | ast.Subscript) for t in targets)
        is_call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        if is_call and _is_log_call(node):
            return
        if is_set or is_call or isinstance(node, ast.AugAssign | ast.Delete | ast.Raise):
            self._change("delete", self._start(node), self._end(node), "pass")

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        if not isinstance(node, ast.Lambda):
            for decorator in node.decorator_list:
                self.visit(decorator)
        self._depth += 1
        for child in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(child)
        self._depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:
            self.visit(child)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant) and not _is_log_call(node):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(t, ast.Name) and t.id in UNSEEN_NAMES for t in node.targets):
            return
        self._swap_neighbours(node.value)
        for child in [*node.targets, node.value]:
            self.visit(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is None:
            return
        self.visit(node.target)
        is_constant = "Final" in ast.unparse(node.annotation)
        is_setting = isinstance(node.target, ast.Name) and self._depth == 0 and not is_constant
        self._is_field = is_setting
        if not is_setting:
            self._swap_neighbours(node.value)
        self.visit(node.value)
        self._is_field = False

    def _swap_neighbours(self, value: ast.expr) -> None:
        """The order of what a module's constant names in a row."""
        if self._depth or not isinstance(value, ast.Tuple | ast.List):
            return
        for left, right in zip(value.elts, value.elts[1:], strict=False):
            start, end = self._start(left), self._end(right)
            middle = self._text[self._end(left) : self._start(right)]
            first = self._text[start : self._end(left)]
            second = self._text[self._start(right) : end]
            self._change("order", start, end, (second + middle + first).decode())

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        pair = ARITHMETIC.get(type(node.op))
        if pair is not None:
            old, new = f"{pair[0]}=", f"{pair[1]}="
            gap = self._end(node.target), self._start(node.value)
            self._swap_token("arithmetic", *gap, old, new)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        is_flag = isinstance(value, ast.Constant) and isinstance(value.value, bool | None)
        if value is not None and not is_flag:
            self._change("return", self._start(value), self._end(value), "None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._change("loop", self._start(node), self._end(node), "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._change("loop", self._start(node), self._end(node), "break")

    # Expressions.

    def visit_If(self, node: ast.If) -> None:
        is_typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if not is_typing:
            self._negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test)
            self.visit(node.test)
        for child in [*node.body, *node.orelse]:
            self.visit(child)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        """Conditions that no other operator changes."""
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            start = self._start(test)
            self._change("condition", start, start, "not ")

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            old, changes = COMPARISONS[type(op)]
            for new in changes:
                gap = self._end(left), self._start(right)
                self._swap_token("comparison", *gap, old, new)
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            gap = self._end(left), self._start(right)
            self._swap_token("and/or", *gap, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start, operand = self._start(node), node.operand
        if isinstance(node.op, ast.Not):
            self._change("not", start, start + len("not "), "")
        elif isinstance(node.op, ast.USub) and not isinstance(operand, ast.Constant):
            self._change("arithmetic", start, start + 1, "")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        pair = ARITHMETIC.get(type(node.op))
        if pair is not None:
            gap = self._end(node.left), self._start(node.right)
            self._swap_token("arithmetic", *gap, *pair)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in OPPOSITE_CALLS:
            new = OPPOSITE_CALLS[node.func.id]
            self._change("min/max", self._start(node.func), self._end(node.func), new)
        is_zip = isinstance(node.func, ast.Name) and node.func.id == "zip"
        keywords = [] if is_zip else node.keywords  # `strict` is an assertion
        for child in [node.func, *node.args, *keywords]:
            self.visit(child)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end, value = self._start(node), self._end(node), node.value
        if isinstance(value, bool):
            self._change("boolean", start, end, repr(not value))
        elif isinstance(value, int | float) and not self._is_field:
            self._change("number", start, end, repr(value + 1))
            less = repr(value - 1)
            self._change("number", start, end, f"({less})" if value < 1 else less)


def _is_log_call(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    called = node.value.func
    if not isinstance(called, ast.Attribute):
        return False
    owner = called.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return name in LOGGERS
