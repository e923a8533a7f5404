"""Python sources by their syntax trees: nothing is imported."""

import ast
from collections.abc import Callable, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Absent(LookupError):
    """Something is not in this source; says what."""


class Source:
    """The modules that `text` knows: it gives a file's text by its path, or None."""

    def __init__(self, text: Callable[[str], str | None]) -> None:
        self._text = text
        self._modules: dict[str, ast.Module] = {}
        self._packages: set[str] = set()

    def module(self, name: str) -> ast.Module:
        if name not in self._modules:
            path = name.replace(".", "/")
            text = self._text(f"{path}.py")
            if text is None:
                text = self._text(f"{path}/__init__.py")
                self._packages.add(name)
            if text is None:
                raise Absent(f"no module {name}")
            self._modules[name] = ast.parse(text)
        return self._modules[name]

    def found(self, module: str, name: str) -> tuple[str, ast.ClassDef]:
        """A class as a module has it: defined there, or imported from another one."""
        for node in _statements(self.module(module).body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.found(self._origin(module, node), alias.name)
        raise Absent(f"no class {name} in {module}")

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        above = node.level - (module in self._packages)
        return ".".join([*parts[: len(parts) - above], *([node.module] if node.module else [])])

    def function(self, module: str, owner: str, name: str) -> Function:
        """A method that a class defines itself: the last of that name is the one it has."""
        _, node = self.found(module, owner)
        defined = [s for s in _statements(node.body) if isinstance(s, Function) and s.name == name]
        if not defined:
            raise Absent(f"{owner} does not define {name}")
        return defined[-1]

    def attributes(self, module: str, owner: str) -> dict[str, ast.expr | None]:
        """What an object of a class has, its bases' too, with the value where one is given."""
        module, node = self.found(module, owner)
        names: dict[str, ast.expr | None] = {}
        for base in node.bases:
            if isinstance(base, ast.Name):
                try:
                    names |= self.attributes(module, base.id)
                except Absent:
                    continue  # not this package's
        for statement in _statements(node.body):
            if isinstance(statement, Function):
                names[statement.name] = None
                names |= dict.fromkeys(_set_on_self(statement))
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                names[statement.target.id] = statement.value
            elif isinstance(statement, ast.Assign):
                names |= {
                    t.id: statement.value for t in statement.targets if isinstance(t, ast.Name)
                }
        return names


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or class, the ones under a condition too."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from _statements(node.body + [s for h in node.handlers for s in h.body])


def _set_on_self(function: Function) -> Iterator[str]:
    """What a method assigns to its `self`."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    if not arguments:
        return
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == arguments[0].arg
        ):
            yield node.attr


def parameters(function: Function) -> set[str]:
    arguments = function.args
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def is_generator(function: Function) -> bool:
    """Whether it yields, its inner functions aside."""
    inner = {
        node
        for other in ast.walk(function)
        if isinstance(other, Function | ast.Lambda) and other is not function
        for node in ast.walk(other)
    }
    return any(
        isinstance(node, ast.Yield | ast.YieldFrom)
        for node in ast.walk(function)
        if node not in inner
    )
