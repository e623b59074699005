"""Decodes what a file holds into the types that the code declares: the border that every JSON file passes once.

    host = load(HostCosts, path, "a host", hint="`flopcast fit DIR` makes hosts")

The types are the schema: dataclasses, TypedDicts, NamedTuples (lists in the file), Literal, optional types, tuples,
sequences, mappings, and what `flopcast.bounds` says of them. A number without bounds is finite, a text is one that can
be written, `Any` is plain JSON. What a type cannot say its `__post_init__` does, by a ValueError. A class whose form in
a file is another has a classmethod `from_record` or `parse`: the type of that one's argument is what the file holds.
Unknown fields are left alone, since a later version may write them. The first thing that is wrong ends in a DataError
with its path, value and what is valid.

Each type is compiled once, to a check of a COLUMN: many values of that type, decoded at once. The fields of ten
thousand rows are a column each, the numbers of all lists in a field one more, and what is checked by loops in C takes
0.1 s per million numbers; value by value it took three times as long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
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

from flopcast.bounds import ByValue, Finite, Kept, Valid, Whole, Within
from flopcast.errors import DataError
from flopcast.json_files import read_json

T = TypeVar("T")
Column = Sequence[Any]
Check = Callable[[Column], Column]  # raises Wrong; returns the column itself where decoding changes nothing

DEEPEST = 64  # levels of what is taken as it is (`Any`); nothing that flopcast writes has ten
LONGEST_TEXT = 1_000_000  # characters
MOST_AT_ONCE = 256  # documents, which stay in the processor's cache from one of their columns to the next
MOST_TOLD = 3  # wrong lines that a message tells of
SHOWN = 60  # characters of a wrong value that a message repeats


class Wrong(ValueError):
    """A value that its type does not admit. `path` leads to it: from a check its first part is a place in the
    column."""

    def __init__(self, told: str, *path: str | int) -> None:
        super().__init__(told)
        self.told, self.path = told, list(path)

    def __str__(self) -> str:
        path = ""
        for part in self.path:
            if isinstance(part, int):
                path += f"[{part}]"
            else:
                path += f"{'.' if path else ''}{part if _is_word(part) else show(part)}"
        return f"{path} {self.told}" if path else self.told


def _is_word(part: str) -> bool:
    return len(part) <= SHOWN and part.isascii() and part.replace("_", "").replace("-", "").isalnum()


def show(value: object) -> str:
    """A value as a message repeats it: escaped, and short."""
    if isinstance(value, int) and not -(1 << 128) < value < 1 << 128:  # repr refuses 4,300 digits and more
        text = "a huge number"
    elif isinstance(value, str | int | float | NoneType):
        text = repr(value[: SHOWN + 1] if isinstance(value, str) else value)
    elif isinstance(value, Mapping):
        text = f"an object of {len(value)} fields"
    elif isinstance(value, Collection):
        text = f"a list of {len(value)}"
    else:
        text = type(value).__name__
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def refused(value: object, valid: str, *path: str | int) -> Wrong:
    return Wrong(f"is {show(value)}: valid is {valid}", *path)


# --- the doors


def load(kind: type[T], path: Path, noun: str, *, hint: str, schema: int | None = None) -> T:
    """The value of a JSON file, plain or gzipped. `noun` ("a host") names what the file should be, `hint` says how to
    come by one, `schema` is the newest that is read, for files that say theirs.

    Raises DataError where the file is missing, torn, too large, no JSON, or not of that kind.
    """
    return decode(kind, read_json(path, noun, hint=hint), str(path), noun, hint=hint, schema=schema)


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
    (decoded,) = decode_each(kind, [value])
    if isinstance(decoded, Wrong):
        raise DataError(f"{says}{decoded}{end}")
    return decoded


def decode_each(kind: type[T], values: Sequence[Any]) -> list[T | Wrong]:
    """Each value as `kind`, or what is wrong with it: many at once, halved until what is wrong is alone."""
    if len(values) > MOST_AT_ONCE:
        parts = [values[start : start + MOST_AT_ONCE] for start in range(0, len(values), MOST_AT_ONCE)]
        return [value for part in parts for value in decode_each(kind, part)]
    try:
        return list(decoder(cast(Hashable, kind))(values))
    except Wrong as wrong:
        half = len(values) // 2
        if half:
            return decode_each(kind, values[:half]) + decode_each(kind, values[half:])
        del wrong.path[0]
        return [wrong]


def by_field(name: str, kinds: Mapping[str, Any]) -> ByValue:
    """The types of objects that say theirs in a field."""

    def type_of(value: Any) -> Any:
        told = value.get(name) if isinstance(value, dict) else None
        if not isinstance(told, str) or told not in kinds:
            raise refused(told, f"one of {', '.join(kinds)}", name)
        return kinds[told]

    return ByValue(type_of)


def left_out(wrong: Mapping[int, str], right: int) -> str:
    """A clause on the lines of a file that are wrong, by number, beside `right` ones: the reasons of the first few."""
    told = [f"line {number}: {why}" for number, why in sorted(wrong.items())]
    more = f"; and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
    return f"{len(told)} of {right + len(told)} rows are wrong and left out: {'; '.join(told[:MOST_TOLD])}{more}"


# --- types to checks


@cache
def decoder(kind: Any) -> Check:
    """The check of a column of values of a type."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Required, NotRequired):
        return decoder(args[0])
    if origin is Annotated:
        return _annotated(args[0], args[1:])
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind is Any or kind is object:
        return _anything(0)
    if origin is Literal:
        return _one_of(args)
    if origin in (Union, UnionType) and len(args) == 2 and NoneType in args:
        return _optional(decoder(args[args[0] is NoneType]))
    if origin is tuple and args[1:] != (...,):
        return _fixed(None, [(place, decoder(arg)) for place, arg in enumerate(args)], len(args))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _sequence(decoder(args[0]), tuple if origin is tuple else None)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(decoder(args[0]), decoder(args[1]))
    for hook in ("from_record", "parse"):
        if hook in getattr(kind, "__dict__", {}):
            return _hooked(getattr(kind, hook))
    if is_typeddict(kind):
        return _typed_dict(kind)
    if is_dataclass(kind):
        return _dataclass(cast(type[Any], kind))
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = get_type_hints(kind, include_extras=True)
        names, defaults = kind._fields, getattr(kind, "_field_defaults", ())
        return _fixed(kind, [(name, decoder(hints[name])) for name in names], len(names) - len(defaults))
    raise TypeError(f"{kind!r} is no type that files hold")


def _annotated(kind: Any, marks: tuple[Any, ...]) -> Check:
    check: Check | None = None
    for mark in marks:
        if isinstance(mark, Within | range):
            check = _number(kind, mark)
        elif isinstance(mark, Valid):
            check = _valid(check or decoder(kind), mark)
        elif isinstance(mark, ByValue):
            check = _by_value(mark)
        elif isinstance(mark, Kept):
            check = _kept(decoder(mark.kind))
        else:
            check = _one_of(mark) if isinstance(mark, tuple) else decoder(mark)
    return check or decoder(kind)


# --- values without parts


def _scalar(kinds: frozenset[type], are_right: Callable[[Column], bool], fault: Callable[[Any], Wrong | None]) -> Check:
    """`are_right` says in one call whether all of some values of `kinds` are right; if not, `fault` finds which."""

    def check(column: Column) -> Column:
        if not (column and kinds.issuperset(map(type, column)) and are_right(column)):
            for place, value in enumerate(column):
                if (wrong := fault(value)) is not None:
                    raise Wrong(wrong.told, place)
        return column

    return check


def _number(kind: Any, bounds: Within | range) -> Check:
    noun = "an integer" if kind is int else "a number"
    if isinstance(bounds, Within):
        least = math.nextafter(bounds.least, math.inf) if bounds.above else bounds.least
        most, valid = bounds.most, f"{noun} {bounds}"
    else:
        least, most = bounds[0], bounds[-1]
        valid = f"{noun} of {least} or more" if most >= (1 << 53) - 1 else f"{noun} from {least} to {most}"
    kinds = frozenset([int] if kind is int else [int, float])

    def are_right(column: Column) -> bool:
        if not (least <= min(column) and max(column) <= most):
            return False
        total = sum(column)  # NaN if one is: `min` and `max` may pass over it
        return bool(total == total)

    def fault(value: Any) -> Wrong | None:
        return None if type(value) in kinds and least <= value <= most else refused(value, valid)

    return _scalar(kinds, are_right, fault)


def _are_texts(column: Column) -> bool:
    return "".join(column).isascii() and max(map(len, column)) <= LONGEST_TEXT


def _fault_of_text(value: Any) -> Wrong | None:
    if type(value) is not str:
        return refused(value, "a text")
    if len(value) > LONGEST_TEXT:
        return Wrong(f"is a text of {len(value):,} characters: valid are {LONGEST_TEXT:,}")
    try:
        value.encode()
    except UnicodeEncodeError:
        return refused(value, "a text without half characters (surrogates)")
    return None


def _one_of(options: Sequence[Any], valid: str = "") -> Check:
    known, kinds = frozenset(options), frozenset(map(type, options))
    valid = valid or ("one of " if len(options) > 1 else "") + ", ".join(map(str, options))

    def fault(value: Any) -> Wrong | None:
        return None if type(value) in kinds and value in known else refused(value, valid)

    return _scalar(kinds, known.issuperset, fault)


_text = _scalar(frozenset([str]), _are_texts, _fault_of_text)
_PLAIN: dict[Any, Check] = {
    str: _text, bool: _one_of((True, False), "true or false"), NoneType: _one_of((None,), "null"),
    int: decoder(Whole), float: decoder(Finite),
}  # fmt: skip


def _valid(check: Check, mark: Valid) -> Check:
    def tried(value: Any) -> None:
        if not mark.is_valid(value):
            raise refused(value, mark.valid)

    def checked(column: Column) -> Column:
        found = check(column)
        try:
            is_right = all(map(mark.is_valid, found))
        except ValueError:
            is_right = False
        if not is_right:
            _each(tried, found)
        return found

    return checked


def _hooked(make: Callable[[Any], Any]) -> Check:
    """A class that makes itself of what its classmethod takes."""
    hints = get_type_hints(make, include_extras=True)
    check = decoder(next(kind for name, kind in hints.items() if name != "return"))
    return lambda column: _each(make, check(column))


def _each(make: Callable[[Any], Any], column: Column) -> Column:
    """What `make` makes of each value; a ValueError of its own is told as one of the value."""
    found: list[Any] = []
    try:
        for value in column:
            found.append(make(value))
    except Wrong as wrong:
        raise Wrong(wrong.told, len(found), *wrong.path) from None
    except ValueError as error:
        raise Wrong(f"is {'wrong' if isinstance(value, dict) else show(value)}: {error}", len(found)) from None
    return found


# --- parts of a column


def _told(check: Check, column: Column, places: Sequence[int], *path: str | int) -> Column:
    """A column decoded that is a part of another: `places` it has there, below `path`."""
    try:
        return check(column)
    except Wrong as wrong:
        wrong.path[:1] = [places[cast(int, wrong.path[0])], *path]
        raise


def _through(check: Check, column: Column, places: Sequence[int]) -> Column:
    """A column whose values at some places are decoded, the others as they are."""
    if len(places) == len(column):
        return check(column)
    part = [column[place] for place in places]
    found = _told(check, part, places)
    if found is part:
        return column
    new = list(column)
    for place, value in zip(places, found, strict=True):
        new[place] = value
    return new


def _grouped(keys: Iterable[Hashable]) -> dict[Any, list[int]]:
    """The places of each key."""
    found: dict[Any, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return found


def _optional(check: Check) -> Check:
    def checked(column: Column) -> Column:
        return _through(check, column, [place for place, value in enumerate(column) if value is not None])

    return checked


def _by_value(mark: ByValue) -> Check:
    def checked(column: Column) -> Column:
        for kind, places in _grouped(_each(mark.type_of, column)).items():
            column = _through(decoder(kind), column, places)
        return column

    return checked


def _kept(check: Check) -> Check:
    def checked(column: Column) -> Column:
        check(column)
        return column

    return checked


@cache
def _anything(level: int) -> Check:
    """Any JSON: finite numbers, texts that can be written, not too deep."""

    def check_of(kind: type, value: Any, place: int) -> Check:
        if kind in _PLAIN:
            return _PLAIN[kind]
        if kind not in (dict, list, tuple):
            raise refused(value, "plain JSON", place)
        if level == DEEPEST:
            raise Wrong(f"is nested more than {DEEPEST} levels deep", place)
        inner = _anything(level + 1)
        return _mapping(_text, inner) if kind is dict else _sequence(inner, None)

    def checked(column: Column) -> Column:
        for kind, places in _grouped(map(type, column)).items():
            column = _through(check_of(kind, column[places[0]], places[0]), column, places)
        return column

    return checked


# --- containers


def _require(kinds: Iterable[type], column: Column, valid: str) -> None:
    known = frozenset(kinds)
    if not known.issuperset(map(type, column)):
        place = next(place for place, value in enumerate(column) if type(value) not in known)
        raise refused(column[place], valid, place)


def _within(column: Sequence[Collection[Any]], at: int) -> tuple[int, int]:
    """(place of the container, place in it) of the item at a place among all items."""
    for place, value in enumerate(column):
        if at < len(value):
            return place, at
        at -= len(value)
    raise IndexError(at)


def _sequence(check: Check, make: Callable[[Iterable[Any]], Any] | None) -> Check:
    """Lists of any length; as they are where `make` is None and nothing in them is changed."""

    def checked(column: Column) -> Column:
        _require((list, tuple), column, "a list")
        items = column[0] if len(column) == 1 else list(chain.from_iterable(column))
        try:
            found = check(items)
        except Wrong as wrong:
            wrong.path[:1] = _within(column, cast(int, wrong.path[0]))
            raise
        if found is items:
            return column if make is None else list(map(make, column))
        rest = iter(found)
        return [(make or list)(islice(rest, len(value))) for value in column]

    return checked


def _mapping(name_check: Check, check: Check) -> Check:
    def checked(column: Column) -> Column:
        _require((dict,), column, "an object")
        names = list(chain.from_iterable(column))
        items = list(chain.from_iterable(value.values() for value in column))
        try:
            found = check(items)
        except Wrong as wrong:
            at = cast(int, wrong.path[0])
            wrong.path[:1] = _within(column, at)[0], names[at]
            raise
        try:
            new_names = name_check(names)
        except Wrong as wrong:
            place, _ = _within(column, cast(int, wrong.path[0]))
            raise Wrong(f"has a field that {wrong.told}", place) from None
        if new_names is names and found is items:
            return column
        pairs = zip(new_names, found, strict=True)
        return [dict(islice(pairs, len(value))) for value in column]

    return checked


def _fixed(make: Callable[..., Any] | None, parts: Sequence[tuple[str | int, Check]], least: int) -> Check:
    """Lists of so many parts, each of its own type, as tuples or what `make` makes of them; the last may be missing
    beyond `least`."""
    most = len(parts)
    valid = f"a list of {most}" if least == most else f"a list of {least} to {most}"

    def of_one_length(column: Column) -> Column:
        places = range(len(column))
        items = zip(*column, strict=True)
        found = [_told(check, some, places, name) for (name, check), some in zip(parts, items, strict=False)]
        return list(zip(*found, strict=True)) if make is None else list(map(make, *found))

    def checked(column: Column) -> Column:
        _require((list, tuple), column, valid)
        for length, places in _grouped(map(len, column)).items():
            if not max(1, least) <= length <= most:
                raise refused(column[places[0]], valid, places[0])
            column = _through(of_one_length, column, places)
        return column

    return checked


Field = tuple[str, Check, bool]  # name, check of its values, whether it has to be there


def _columns(objects: Column, parts: Sequence[Field]) -> Iterator[tuple[str, Sequence[int], Column, Column]]:
    """Each field that any of some objects has: its name, the places of the objects that have it, its values as they
    are and decoded."""
    _require((dict,), objects, "an object")
    for name, check, is_needed in parts:
        values = [value[name] for value in objects if name in value]
        places: Sequence[int] = range(len(objects))
        if len(values) < len(objects):
            if is_needed:
                raise Wrong("is missing", next(place for place in places if name not in objects[place]), name)
            places = [place for place in places if name in objects[place]]
        if values:
            yield name, places, values, _told(check, values, places, name)


def _typed_dict(kind: Any) -> Check:
    # marks in annotations that are texts are not counted in `__required_keys__` (Python 3.11 to 3.13)
    parts = [
        (
            name,
            decoder(hint),
            get_origin(hint) is Required or (get_origin(hint) is not NotRequired and name in kind.__required_keys__),
        )
        for name, hint in get_type_hints(kind, include_extras=True).items()
    ]

    def checked(column: Column) -> Column:
        changed = [(name, places, new) for name, places, old, new in _columns(column, parts) if new is not old]
        if not changed:
            return column
        found = list(map(dict, column))
        for name, places, values in changed:
            for place, value in zip(places, values, strict=True):
                found[place][name] = value
        return found

    return checked


def _dataclass(kind: type[Any]) -> Check:
    hints = get_type_hints(kind, include_extras=True)
    parts = [
        (field.name, decoder(hints[field.name]), field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
        if field.init
    ]

    def checked(column: Column) -> Column:
        found: list[dict[str, Any]] = [{} for _ in column]
        for name, places, _, values in _columns(column, parts):
            for place, value in zip(places, values, strict=True):
                found[place][name] = value
        return _each(lambda fields: kind(**fields), found)

    return checked
