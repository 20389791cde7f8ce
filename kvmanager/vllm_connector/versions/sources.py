"""Reads with `ast` what the names of a Python package are: classes with their members, functions
with their parameters. Nothing is imported, so a wheel that is not installed can be read as well.
"""

import ast
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec


class Method(msgspec.Struct, frozen=True, omit_defaults=True):
    """One method of a class that this package derives from.

    kind: method, property, classmethod or staticmethod.
    parameters: as in the source, without annotations and with `...` for each default.
    returns: the constant that it returns and does nothing else; "..." for any other code.
    """

    parameters: str
    kind: str = "method"
    returns: str = "None"
    abstract: bool = False


class Name(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one name of vLLM is.

    kind: class, function or value.
    parameters: of a function, in the form of `Method.parameters`.
    bases: of a class, the full names of the imported ones among its direct base classes.
    members: of a class and its bases in the package, names of fields, and of methods unless
        `methods` has them; without private names where there are no `methods`.
    """

    kind: str
    parameters: str = ""
    bases: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    methods: dict[str, Method] = {}


class Sources:
    """Python modules below a directory or in a wheel. Each is parsed when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root: Path | zipfile.Path = root if root.is_dir() else zipfile.Path(str(root))
        self._modules: dict[str, tuple[bool, list[ast.stmt]] | None] = {}

    def has_module(self, module: str) -> bool:
        """Whether the module's source is there."""
        return self._parsed(module) is not None

    def name(self, full_name: str, *, with_methods: bool = False) -> Name | None:
        """What a module's name is, also where the module imports it. None if it is not there.

        `with_methods`: for a class, its methods with their parameters.
        """
        found = self.find(*_split(full_name))
        if found is None:
            return None
        module, node = found
        match node:
            case ast.ClassDef():
                return self._class(module, node, with_methods)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return Name("function", _parameters(node.args))
            case _:
                return Name("value")

    def version(self) -> str:
        """vLLM's version, or "dev"."""
        found = self.find("vllm.version", "__version__")
        # Written by vLLM's build as `__version__ = version = "0.33.0"`, after its annotation.
        for node in self._statements(found[0]) if found is not None else ():
            match node:
                case ast.Assign(targets=targets, value=ast.Constant(value=str(text))):
                    if any(isinstance(t, ast.Name) and t.id == "__version__" for t in targets):
                        return text
        return "dev"

    def find(
        self, module: str, name: str, passed: frozenset[str] = frozenset()
    ) -> tuple[str, ast.stmt] | None:
        """The module that defines the name, and the statement there; follows imports of `module`.

        `passed`: modules that imported the name on the way here.
        """
        if module in passed:
            return None
        for node in self._statements(module):
            match node:
                case ast.ImportFrom():
                    source = self._source_of(module, node)
                    for alias in node.names:
                        if alias.name == "*" or (alias.asname or alias.name) == name:
                            wanted = name if alias.name == "*" else alias.name
                            found = self.find(source, wanted, passed | {module})
                            if found is not None:
                                return found
                case _ if name in _defined(node):
                    return module, node
        return None

    def _class(self, module: str, node: ast.ClassDef, with_methods: bool) -> Name:
        bases: list[str] = []
        members: set[str] = set()
        methods: dict[str, Method] = {}
        for base in reversed(node.bases):
            # Generic[T] is a subscript.
            base = base.value if isinstance(base, ast.Subscript) else base
            if not isinstance(base, ast.Name):
                continue
            if (source := self._imported_as(module, base.id)) is not None:
                bases.insert(0, source)
            found = self.find(module, base.id)
            if found is not None and isinstance(found[1], ast.ClassDef):
                inherited = self._class(found[0], found[1], with_methods)
                members.update(inherited.members)
                methods.update(inherited.methods)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                members.update(_assigned_to_self(statement))
                if with_methods:
                    methods[statement.name] = _method(statement)
                    continue
            members.update(_defined(statement))
        hidden = "__" if with_methods else "_"
        shown = (name for name in members if not name.startswith(hidden))
        return Name("class", bases=tuple(bases), members=tuple(sorted(shown)), methods=methods)

    def _imported_as(self, module: str, name: str) -> str | None:
        """The full name that a module imports as `name`."""
        for node in self._statements(module):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return f"{self._source_of(module, node)}.{alias.name}"
        return None

    def _source_of(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parsed = self._parsed(module)
        is_package = parsed is not None and parsed[0]
        parts = module.split(".")
        above = parts[: len(parts) - node.level + is_package]
        return ".".join([*above, node.module] if node.module else above)

    def _statements(self, module: str) -> Iterator[ast.stmt]:
        parsed = self._parsed(module)
        yield from _flat(parsed[1]) if parsed is not None else ()

    def _parsed(self, module: str) -> tuple[bool, list[ast.stmt]] | None:
        """Whether the module is a package, and its statements."""
        if module not in self._modules:
            self._modules[module] = None
            path = module.replace(".", "/")
            for is_package, place in ((False, f"{path}.py"), (True, f"{path}/__init__.py")):
                file = self._root.joinpath(place)
                if file.is_file():
                    body = ast.parse(file.read_text(encoding="utf-8")).body
                    self._modules[module] = (is_package, body)
                    break
        return self._modules[module]


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, and those under `if` (as with TYPE_CHECKING) and `try`."""
    for node in body:
        match node:
            case ast.If():
                yield from _flat([*node.body, *node.orelse])
            case ast.Try():
                yield from _flat([*node.body, *node.orelse])
                for handler in node.handlers:
                    yield from _flat(handler.body)
            case _:
                yield node


def _defined(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            if "overload" not in _decorators(node):
                yield name
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _assigned_to_self(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.stmt) -> set[str]:
    found = getattr(node, "decorator_list", [])
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in found}


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Method:
    decorators = _decorators(node)
    kind = "method"
    if decorators & {"property", "cached_property"}:
        kind = "property"
    elif found := decorators & {"classmethod", "staticmethod"}:
        kind = found.pop()
    return Method(
        _parameters(node.args), kind, _returned(node.body), "abstractmethod" in decorators
    )


def _parameters(args: ast.arguments) -> str:
    def bare(found: Iterable[ast.arg]) -> list[ast.arg]:
        return [ast.arg(arg.arg) for arg in found]

    anything = ast.Constant(...)
    return ast.unparse(
        ast.arguments(
            posonlyargs=bare(args.posonlyargs),
            args=bare(args.args),
            vararg=ast.arg(args.vararg.arg) if args.vararg else None,
            kwonlyargs=bare(args.kwonlyargs),
            kw_defaults=[None if default is None else anything for default in args.kw_defaults],
            kwarg=ast.arg(args.kwarg.arg) if args.kwarg else None,
            defaults=[anything] * len(args.defaults),
        )
    )


def _returned(body: Sequence[ast.stmt]) -> str:
    """In the form of `Method.returns`."""
    match [node for node in body if not _is_text(node)]:
        case [] | [ast.Pass()] | [ast.Return(value=None)]:
            return "None"
        case [ast.Return(value=ast.Constant(value=bool() | None as value))]:
            return str(value)
        case _:
            return "..."


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _split(full_name: str) -> tuple[str, str]:
    module, _, name = full_name.rpartition(".")
    return module, name
