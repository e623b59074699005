"""Decodes what a file holds into the types that the code declares: the border that every JSON file passes once.

    host = load(HostCosts, path, "a host", hint="`flopcast fit DIR` makes hosts")

The types are the schema: dataclasses, TypedDicts, NamedTuples (lists in the file), Literal, unions, tuples, sequences,
mappings, and numbers within bounds (`Annotated[float, Within(...)]`, `Annotated[int, range(1, 9)]`; `Positive`,
`Count` and others below). A number without bounds is finite, a text is one that can be written, `Any` is plain JSON.
What a type cannot say its `__post_init__` does, by a ValueError. A class whose form in a file is another has a
classmethod `from_record` or `parse`: the type of that one's argument is what the file holds. Unknown fields are left
alone, since a later version may write them. The first thing that is wrong ends in a DataError with its path, value and
what is valid.

Each type is compiled to a closure once. Lists of numbers are checked by C loops (`min`, `max`, `sum`): 0.1 s per
million.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from gzip import BadGzipFile
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    NotRequired,
    Required,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from flopcast import files
from flopcast.errors import DataError

T = TypeVar("T")
Check = Callable[[Any], Any]

MOST_BYTES = 64 * 1024**2  # of a document; the largest that ships has 10 MB
MOST_CONTAINERS = 2_000_000  # objects and lists of a document, 64 bytes of memory and more each
DEEPEST = 64  # levels of what is taken as it is (`Any`); nothing that flopcast writes has ten
LONGEST_TEXT = 1_000_000  # characters
SHOWN = 60  # characters of a wrong value that a message repeats


@dataclass(frozen=True)
class Within:
    """Bounds of a number: `least` to `most`, without `least` itself where `above`."""

    least: float
    most: float
    above: bool = False

    def __str__(self) -> str:
        if self.most < LARGE:
            return f"{f'above {self.least:g}, to' if self.above else f'from {self.least:g} to'} {self.most:g}"
        if self.least <= -LARGE:
            return "that is finite"
        return f"above {self.least:g}" if self.above else f"of {self.least:g} or more"


@dataclass(frozen=True)
class Valid:
    """What a type cannot say: `is_valid` of a decoded value, else it is refused with the words of `valid`. An
    `is_valid` that raises ValueError refuses with that error's words."""

    is_valid: Callable[[Any], bool]
    valid: str


@dataclass(frozen=True)
class By:
    """A function that decodes in place of the type: it returns the value or raises Wrong."""

    check: Check


@dataclass(frozen=True)
class As:
    """The type that a value is decoded as, where the code declares a wider one (a plain `dict` for a TypedDict)."""

    kind: Any


LARGE = 1e30  # more than any count, rate or size in SI units: products of a few stay finite
_FINITE = Within(-LARGE, LARGE)
Finite = Annotated[float, _FINITE]
Positive = Annotated[float, Within(0.0, LARGE, above=True)]
NonNegative = Annotated[float, Within(0.0, LARGE)]
Seconds = Annotated[float, Within(0.0, 1e9, above=True)]
Share = Annotated[float, Within(0.0, 1.0)]
Deviation = Annotated[float, Within(0.0, 100.0)]  # of log seconds
Size = Annotated[int, range(1, 1 << 53)]
Count = Annotated[int, range(1 << 53)]
_WHOLE = range(-(1 << 63), 1 << 63)


class Wrong(ValueError):
    """A value that its type does not admit; `path` leads to it from where decoding began."""

    def __init__(self, told: str) -> None:
        super().__init__(told)
        self.told = told
        self.path: list[str | int] = []

    def within(self, part: str | int) -> Wrong:
        self.path.insert(0, part)
        return self

    def __str__(self) -> str:
        path = ""
        for part in self.path:
            path += (
                f"[{part}]"
                if isinstance(part, int)
                else f"{'.' if path else ''}{part if _is_word(part) else show(part)}"
            )
        return f"{path} {self.told}" if path else self.told


def _is_word(part: str) -> bool:
    return len(part) <= SHOWN and part.isascii() and part.replace("_", "").replace("-", "").isalnum()


def show(value: object) -> str:
    """A value as a message repeats it: escaped, and short."""
    if isinstance(value, str | int | float | NoneType):
        text = repr(value[: SHOWN + 1] if isinstance(value, str) else value) if not _is_huge(value) else "a huge number"
    elif isinstance(value, Mapping):
        text = f"an object of {len(value)} fields"
    elif isinstance(value, Collection):
        text = f"a list of {len(value)}"
    else:
        text = type(value).__name__
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _is_huge(value: object) -> bool:
    return isinstance(value, int) and not -(1 << 128) < value < 1 << 128  # repr refuses 4,300 digits and more


def refused(value: object, valid: str) -> Wrong:
    return Wrong(f"is {show(value)}: valid is {valid}")


# --- the doors


def load(kind: type[T], path: Path, noun: str, *, hint: str, schema: int | None = None) -> T:
    """The value of a JSON file, plain or gzipped. `noun` ("a host") names what the file should be, `hint` says how to
    come by one, `schema` is the newest that is read, for files that say theirs.

    Raises DataError where the file is missing, torn, too large, no JSON, or not of that kind.
    """
    return decode(kind, read_json(path, noun, hint=hint), str(path), noun, hint=hint, schema=schema)


def read_json(path: Path, noun: str, *, hint: str) -> Any:
    """What a JSON file holds, within bounds but not yet decoded. Raises DataError as `load` does."""
    try:
        data = files.read(path, MOST_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: {hint}") from None
    except BadGzipFile as error:
        raise DataError(f"{path} is not {noun}: {error}; {hint}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; {hint}") from None
    try:
        return parse_json(data)
    except ValueError as error:
        raise DataError(f"{path} is not {noun}: {error}; {hint}") from None


def decode(kind: type[T], value: Any, source: str, noun: str = "", *, hint: str = "", schema: int | None = None) -> T:
    """A value as `kind`. `source` begins the message of the DataError that it raises where the value is not one."""
    says = f"{source} is not {noun}: " if noun else f"{source}: "
    end = f"; {hint}" if hint else ""
    if schema is not None:
        found = value.get("schema") if isinstance(value, dict) else None
        if type(found) is not int or found < 1:
            raise DataError(f"{says}an object with a `schema` of {schema} is expected{end}")
        if found > schema:
            raise DataError(
                f"{source}: schema {show(found)} is newer than this flopcast reads ({schema}): upgrade flopcast"
            )
    try:
        return cast(T, decoder(cast(Any, kind))(value))
    except Wrong as wrong:
        raise DataError(f"{says}{wrong}{end}") from None


def parse_json(data: bytes | str) -> Any:
    """JSON as the standard has it: no NaN, no infinities, UTF-8. Raises ValueError, also for what is nested too deeply
    or has so many objects and lists that it would fill the memory."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    if text.count("[") + text.count("{") > MOST_CONTAINERS:
        raise ValueError(f"it has more than {MOST_CONTAINERS:,} objects and lists")
    try:
        return _JSON.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON: a number is finite")


_JSON = json.JSONDecoder(parse_constant=_no_number)


# --- types to closures


@cache
def decoder(kind: Any) -> Check:
    """The closure that returns a value as `kind` or raises Wrong."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Required, NotRequired):
        return decoder(args[0])
    if origin is Annotated:
        return _annotated(args[0], args[1:])
    if kind is Any or kind is object:
        return _plain
    if kind in _SCALARS:
        return _SCALARS[kind]()
    if origin is Literal:
        return _one_of(args)
    if origin in (Union, UnionType):
        return _union(args)
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        return _fixed(tuple, [("", decoder(arg)) for arg in args], len(args))
    if origin in (tuple, list, frozenset) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return _sequence(args[0], origin if origin in (tuple, frozenset) else None)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(args[0], args[1])
    return _class(kind)


def _class(kind: Any) -> Check:
    for hook in ("from_record", "parse"):
        if hook in getattr(kind, "__dict__", {}):
            return _hooked(getattr(kind, hook))
    if is_typeddict(kind):
        return _typed_dict(kind)
    if is_dataclass(kind):
        return _dataclass(cast(type[Any], kind))
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = get_type_hints(kind, include_extras=True)
        names = kind._fields
        least = len(names) - len(getattr(kind, "_field_defaults", {}))
        return _fixed(lambda found: kind(*found), [(name, decoder(hints[name])) for name in names], least)
    raise TypeError(f"{kind!r} is no type that files hold")


def _annotated(kind: Any, marks: tuple[Any, ...]) -> Check:
    check = decoder(kind)
    for mark in marks:
        if isinstance(mark, Within | range):
            check = _number(kind, mark)
        elif isinstance(mark, As):
            check = decoder(mark.kind)
        elif isinstance(mark, By):
            check = mark.check
        elif isinstance(mark, Valid):
            check = _valid(check, mark)
    return check


def _limits(kind: Any, bounds: Within | range) -> tuple[float, float, str]:
    """(least, most, words) of a number; comparisons with them are false for NaN."""
    if isinstance(bounds, range):
        whole = "an integer"
        if bounds == _WHOLE:
            return bounds[0], bounds[-1], whole
        large = bounds[-1] >= (1 << 53) - 1
        return (
            bounds[0],
            bounds[-1],
            f"{whole} of {bounds[0]} or more" if large else f"{whole} from {bounds[0]} to {bounds[-1]}",
        )
    least = math.nextafter(bounds.least, math.inf) if bounds.above else bounds.least
    return least, bounds.most, f"{'an integer' if kind is int else 'a number'} {bounds}"


def _number(kind: Any, bounds: Within | range) -> Check:
    least, most, valid = _limits(kind, bounds)
    other = int if kind is int else float

    def check(value: Any) -> Any:
        own = type(value)
        if (own is int or own is other) and least <= value <= most:
            return value
        raise refused(value, valid)

    return check


def _text() -> Check:
    def check(value: Any) -> Any:
        if type(value) is str and len(value) <= LONGEST_TEXT and value.isascii():
            return value
        if type(value) is not str:
            raise refused(value, "a text")
        if len(value) > LONGEST_TEXT:
            raise Wrong(f"is a text of {len(value):,} characters: valid are {LONGEST_TEXT:,}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise refused(value, "a text without half characters (surrogates)") from None
        return value

    return check


def _truth() -> Check:
    def check(value: Any) -> Any:
        if value is True or value is False:
            return value
        raise refused(value, "true or false")

    return check


def _none() -> Check:
    def check(value: Any) -> Any:
        if value is None:
            return value
        raise refused(value, "null")

    return check


_SCALARS: dict[Any, Callable[[], Check]] = {
    str: _text, bool: _truth, NoneType: _none,
    int: lambda: _number(int, _WHOLE), float: lambda: _number(float, _FINITE),
    dict: lambda: _mapping(str, Any), list: lambda: _sequence(Any, None),
}  # fmt: skip
_write = _text()


def _plain(value: Any, level: int = 0) -> Any:
    """Any JSON: finite numbers, texts that can be written, not too deep."""
    kind = type(value)
    if kind is str:
        return _write(value)
    if kind is float:
        if math.isfinite(value):
            return value
        raise refused(value, "a number that is finite")
    if kind is dict or kind is list or kind is tuple:
        if level >= DEEPEST:
            raise Wrong(f"is nested more than {DEEPEST} levels deep")
        for name, item in value.items() if kind is dict else enumerate(value):
            if (type(item) is not int or _is_huge(item)) and item is not None:
                try:
                    _plain(item, level + 1)
                    if kind is dict:
                        _write(name)
                except Wrong as wrong:
                    raise wrong.within(name) from None
        return value
    if value is None or kind is bool or (kind is int and not _is_huge(value)):
        return value
    raise refused(value, "plain JSON")


def _one_of(options: tuple[Any, ...]) -> Check:
    known, kinds = frozenset(options), frozenset(map(type, options))
    valid = ", ".join(map(str, options))

    def check(value: Any) -> Any:
        if type(value) in kinds and value in known:
            return value
        raise refused(value, valid if len(options) == 1 else f"one of {valid}")

    return check


def _union(members: tuple[Any, ...]) -> Check:
    others = [decoder(member) for member in members if member is not NoneType]
    is_optional = len(others) < len(members)
    if len(others) == 1:
        only = others[0]
        return lambda value: None if value is None else only(value)

    def check(value: Any) -> Any:
        if value is None and is_optional:
            return None
        told = []
        for other in others:
            try:
                return other(value)
            except Wrong as wrong:
                told.append(wrong)
        deepest = max(told, key=lambda wrong: len(wrong.path))  # the member that came nearest
        if deepest.path:
            raise deepest
        valid = list(dict.fromkeys(wrong.told.partition(": valid is ")[2] or wrong.told for wrong in told))
        raise refused(value, " or ".join(valid))

    return check


def _valid(check: Check, mark: Valid) -> Check:
    def checked(value: Any) -> Any:
        found = check(value)
        try:
            if mark.is_valid(found):
                return found
        except Wrong:
            raise
        except ValueError as error:
            raise Wrong(f"is {show(value)}: {error}") from None
        raise refused(value, mark.valid)

    return checked


def _hooked(make: Callable[[Any], Any]) -> Check:
    """A class that makes itself of what its classmethod takes."""
    hints = get_type_hints(make, include_extras=True)
    taken = next(kind for name, kind in hints.items() if name != "return")
    check = decoder(taken)

    def hooked(value: Any) -> Any:
        found = check(value)
        try:
            return make(found)
        except Wrong:
            raise
        except ValueError as error:
            raise Wrong(f"is {show(value)}: {error}") from None

    return hooked


# --- containers


def _bounds(kind: Any) -> tuple[float, float] | None:
    """The limits of a type of plain numbers; None for any other type."""
    if kind is float:
        return _limits(kind, _FINITE)[:2]
    if kind is int:
        return _limits(kind, _WHOLE)[:2]
    if get_origin(kind) is Annotated and (base := get_args(kind)[0]) in (int, float):
        marks = get_args(kind)[1:]
        if len(marks) == 1 and isinstance(marks[0], Within | range):
            return _limits(base, marks[0])[:2]
    return None


def _all_numbers(kind: Any) -> Callable[[Collection[Any]], bool] | None:
    """Whether all of some values are numbers of `kind`, by loops in C; None where `kind` is no number. A value that is
    no number counts as False, never as an error: the slow way then finds which."""
    limits = _bounds(kind)
    if limits is None:
        return None
    least, most = limits
    kinds = {int} if kind is int or get_args(kind)[:1] == (int,) else {int, float}

    def is_right(values: Collection[Any]) -> bool:
        if not values:
            return True
        if not kinds.issuperset(map(type, values)) or not (least <= min(values) and max(values) <= most):
            return False
        total = sum(values)  # NaN if one is: `min` and `max` may pass over it
        return bool(total == total)

    return is_right


def _each(check: Check, values: Iterable[Any]) -> list[Any]:
    found = []
    for place, value in enumerate(values):
        try:
            found.append(check(value))
        except Wrong as wrong:
            raise wrong.within(place) from None
    return found


def _sequence(kind: Any, make: Callable[[Iterable[Any]], Any] | None) -> Check:
    """A list of any length; as it is where `make` is None and nothing in it is changed."""
    check, is_right = decoder(kind), _all_numbers(kind)
    inner = get_args(kind)[0] if get_origin(kind) in (tuple, list, Sequence) and len(get_args(kind)) else None
    are_right = _all_numbers(inner) if inner is not None and get_args(kind)[1:] in ((), (...,)) else None
    make_inner = tuple if get_origin(kind) is tuple else None

    def checked(value: Any) -> Any:
        if type(value) is not list and type(value) is not tuple:
            raise refused(value, "a list")
        if is_right is not None and is_right(value):
            return value if make is None else make(value)
        if (
            are_right is not None
            and {list, tuple}.issuperset(map(type, value))
            and are_right(list(chain.from_iterable(value)))
        ):
            rows = value if make_inner is None else list(map(make_inner, value))
            return rows if make is None else make(rows)
        found = _each(check, value)
        if make is not None:
            return make(found)
        return value if all(new is old for new, old in zip(found, value, strict=True)) else found

    return checked


def _fixed(make: Callable[[list[Any]], Any], parts: Sequence[tuple[str, Check]], least: int) -> Check:
    """A list of so many parts, each of its own type; the last may be missing beyond `least`."""
    most = len(parts)
    checks = [check for _, check in parts]
    length = f"{most}" if least == most else f"{least} to {most}"

    def checked(value: Any) -> Any:
        if type(value) is not list and type(value) is not tuple:
            raise refused(value, f"a list of {length}")
        if not least <= len(value) <= most:
            raise refused(value, f"a list of {length}")
        found: list[Any] = []
        try:
            for check, item in zip(checks, value, strict=False):
                found.append(check(item))
        except Wrong as wrong:
            raise wrong.within(parts[len(found)][0] or len(found)) from None
        return _made(make, found)

    return checked


def _mapping(key: Any, kind: Any) -> Check:
    check, is_right = decoder(kind), _all_numbers(kind)
    name_of = None if key is str else decoder(key)

    def checked(value: Any) -> Any:
        if type(value) is not dict:
            raise refused(value, "an object")
        if not "".join(value).isascii():  # JSON's names are texts
            for name in value:
                _write(name)
        if is_right is not None and is_right(value.values()):
            found = value
        else:
            found = {}
            is_same = True
            for name, item in value.items():
                try:
                    new = found[name] = check(item)
                except Wrong as wrong:
                    raise wrong.within(name) from None
                is_same = is_same and new is item
            if is_same:
                found = value
        if name_of is None:
            return found
        try:
            return {name_of(name): item for name, item in found.items()}
        except Wrong as wrong:
            raise Wrong(f"has a field that {wrong.told}") from None

    return checked


def _made(make: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """What `make` makes; a ValueError of its own checks is told as one of the value."""
    try:
        return make(*args, **named)
    except Wrong:
        raise
    except ValueError as error:
        raise Wrong(f"is wrong: {error}") from None


def _typed_dict(kind: Any) -> Check:
    hints = get_type_hints(kind, include_extras=True)
    checks = {name: decoder(hint) for name, hint in hints.items()}
    # marks in annotations that are texts are not counted in `__required_keys__` (Python 3.11 to 3.13)
    needed = [
        name
        for name, hint in hints.items()
        if get_origin(hint) is Required or (get_origin(hint) is not NotRequired and name in kind.__required_keys__)
    ]
    known = checks.get

    def checked(value: Any) -> Any:
        if type(value) is not dict:
            raise refused(value, "an object")
        for name in needed:
            if name not in value:
                raise Wrong("is missing").within(name)
        changed = {}
        name = ""
        try:
            for name, item in value.items():
                check = known(name)
                if check is not None and (new := check(item)) is not item:
                    changed[name] = new
        except Wrong as wrong:
            raise wrong.within(name) from None
        return {**value, **changed} if changed else value

    return checked


def _dataclass(kind: type[Any]) -> Check:
    hints = get_type_hints(kind, include_extras=True)
    parts = [
        (field.name, decoder(hints[field.name]), field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
        if field.init
    ]

    def checked(value: Any) -> Any:
        if type(value) is not dict:
            raise refused(value, "an object")
        found: dict[str, Any] = {}
        for name, check, is_needed in parts:
            if name in value:
                try:
                    found[name] = check(value[name])
                except Wrong as wrong:
                    raise wrong.within(name) from None
            elif is_needed:
                raise Wrong("is missing").within(name)
        return _made(kind, **found)

    return checked
