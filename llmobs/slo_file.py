"""A YAML file read into frozen dataclasses; what is wrong is told with its line.

The dataclasses are the schema: a key is a field's name (`for_` is written `for`), its annotation
says what is accepted. What a file leaves out is as in the file that it is laid over. This is read
inside vLLM's processes too, so there is nothing here but PyYAML, which vLLM imports anyway.
"""

import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class SloError(ValueError):
    """One line: the file, the line in it, and what is accepted there."""


class FieldError(ValueError):
    """Raised by a dataclass's own check: what is wrong with one of its fields."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


@dataclass(frozen=True)
class Scalar:
    """What is accepted, in words, and how the text is read (None: it is not that)."""

    accepted: str
    read: Callable[[str], Any]


def _duration(text: str) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    return round(float(match[1]) * UNITS[match[2]], 6) if match else None


def _number(text: str) -> float | None:
    if not re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", text):
        return None
    return float(text) or None


def _share(text: str) -> float | None:
    percent = text.endswith("%")
    number = _number(text.removesuffix("%").strip())
    if number is None:
        return None
    share = round(number / 100, 10) if percent else number
    return share if share <= 1 else None


def _count(text: str) -> int | None:
    digits = text.replace("_", "")
    return int(digits) or None if re.fullmatch(r"\d{1,12}", digits) else None


def _word(text: str) -> str | None:
    return text if re.fullmatch(r"[A-Za-z0-9+_.-]{1,32}", text) else None


def _address(text: str) -> str | None:
    return text.rstrip("/") if re.fullmatch(r"https?://[^\s\"\\{}]+", text) else None


def _switch(text: str) -> bool | None:
    return {"true": True, "false": False}.get(text.lower())


Seconds = Annotated[
    float,
    Scalar("a duration such as 300ms, 30s, 5m or 6h", lambda text: _duration(text) or None),
]
Hold = Annotated[float, Scalar("a duration such as 0s, 30s or 5m", _duration)]
Number = Annotated[float, Scalar("a number above 0", _number)]
Share = Annotated[float, Scalar("a share above 0, such as 15% or 0.15", _share)]
Count = Annotated[int, Scalar("a whole number above 0", _count)]
Word = Annotated[str, Scalar("1 to 32 letters, digits or any of + _ . -", _word)]
Address = Annotated[str, Scalar("an address such as http://localhost:3000", _address)]
Switch = Annotated[bool, Scalar("true or false", _switch)]


def read(schema: type[T], path: Path, base: T | None = None) -> T:
    """The file as a `schema`, laid over `base`. Raises SloError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise SloError(f"{path}: {reason}; accepted is a YAML file like llmobs/slo.yaml") from None
    try:
        node = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise SloError(f"{path}: line {line}: {problem}; accepted is YAML") from None
    except RecursionError:
        raise SloError(f"{path}: line 1: nested too deep; accepted is YAML") from None
    if node is None and base is not None:
        return base  # an empty file changes nothing
    read_: T = _Builder(path).build(schema, node, "the file", base)
    return read_


class _Builder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, node: Any, problem: str, accepted: str) -> SloError:
        line = node.start_mark.line + 1 if node is not None else 1
        return SloError(f"{self.path}: line {line}: {problem}; accepted is {accepted}")

    def build(self, kind: Any, node: Any, where: str, base: Any = None) -> Any:
        """The node as what `kind` says; `where` names it in an error."""
        if is_dataclass(kind):
            return self._mapping(kind, node, where, base)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is tuple:
            return self._list(arguments[0], node, where)
        if type(None) in arguments:  # such as `Count | None`
            if isinstance(node, yaml.ScalarNode) and node.value in ("null", "~", ""):
                return None
            kind = next(a for a in arguments if a is not type(None))
            origin, arguments = get_origin(kind), get_args(kind)
        if origin is Literal:
            words = ", ".join(arguments[:-1]) + " or " + arguments[-1]
            return self._scalar(
                Scalar(words, lambda text: text if text in arguments else None), node, where
            )
        return self._scalar(arguments[1], node, where)

    def _scalar(self, scalar: Scalar, node: Any, where: str) -> Any:
        value = scalar.read(node.value.strip()) if isinstance(node, yaml.ScalarNode) else None
        if value is None:
            shown = repr(node.value) if isinstance(node, yaml.ScalarNode) else f"a {node.id}"
            raise self.fail(node, f"`{where}` is {shown}", scalar.accepted)
        return value

    def _list(self, kind: Any, node: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            raise self.fail(node, f"`{where}` is no list", "a list of at least one")
        return tuple(self.build(kind, item, f"an item of {where}") for item in node.value)

    def _mapping(self, kind: Any, node: Any, where: str, base: Any) -> Any:
        known = {f.name.rstrip("_"): f for f in fields(kind) if f.init}
        accepted = "the keys " + ", ".join(known)
        if not isinstance(node, yaml.MappingNode):
            raise self.fail(node, f"`{where}` is no mapping", accepted)
        hints = get_type_hints(kind, include_extras=True)
        values: dict[str, Any] = {}
        for key, value in node.value:
            field = known.get(str(key.value))
            if field is None:
                raise self.fail(key, f"`{key.value}` is not known in `{where}`", accepted)
            if field.name in values:
                raise self.fail(key, f"`{key.value}` stands there twice", "one of each key")
            under = getattr(base, field.name, None)
            values[field.name] = self.build(hints[field.name], value, str(key.value), under)
        for name, field in known.items():
            if field.name not in values and base is not None:
                values[field.name] = getattr(base, field.name)
            elif field.name not in values and _needed(field):
                raise self.fail(node, f"`{name}` is missing in `{where}`", accepted)
        try:
            return kind(**values)
        except FieldError as error:
            at = next((k for k, _ in node.value if k.value == error.field), node)
            raise SloError(f"{self.path}: line {at.start_mark.line + 1}: {error}") from None


def _needed(field: "Field[Any]") -> bool:
    return field.default is MISSING and field.default_factory is MISSING
