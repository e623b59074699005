"""The border that every file passes: right values come back as their types, wrong ones are refused with their path."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Required, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast import files
from flopcast.bounds import ByValue, Count, Kept, NonNegative, Positive, Size, Valid, Within
from flopcast.decode import Wrong, decode, decode_each, load, refused, show
from flopcast.errors import DataError
from flopcast.json_files import parse_json


class Place(NamedTuple):
    row: Count
    name: str
    layer: int | None = None


class Reading(TypedDict, total=False):
    key: Required[str]
    seconds: Positive | None
    samples: Sequence[Positive]
    status: Literal["ok", "oom"]


class Colour:
    """Stands in a file as a text."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def parse(cls, text: str) -> Colour:
        if text not in ("red", "green"):
            raise ValueError(f"colour {text!r}: known are red, green")
        return cls(text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Colour) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Inner:
    value: Annotated[float, Within(0.0, 1.0)]
    basis: Literal["measured", "datasheet"] = "measured"


@dataclass(frozen=True)
class Outer:
    name: str
    sizes: tuple[Size, ...]
    rows: tuple[tuple[float, ...], ...]
    costs: Mapping[str, NonNegative]
    inner: Inner | None = None
    each: dict[str, Inner] = field(default_factory=dict)
    by_colour: dict[Colour, float] = field(default_factory=dict)
    places: tuple[Place, ...] = ()
    pair: tuple[str, float] = ("", 0.0)
    extra: dict[str, Any] = field(default_factory=dict)
    is_hot: bool = False

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.sizes):
            raise ValueError(f"{len(self.sizes)} sizes and {len(self.rows)} rows")


RIGHT: dict[str, Any] = {
    "name": "a", "sizes": [1, 2], "rows": [[1.0, 2], [3.5]], "costs": {"launch": 0, "view": 1e-6},
    "inner": {"value": 0.5}, "each": {"x": {"value": 1, "basis": "datasheet"}}, "by_colour": {"red": 2.0},
    "places": [[1, "b", 3], [0, "c"]], "pair": ["d", 4.0], "extra": {"any": [1, {"deep": None}]}, "is_hot": True,
}  # fmt: skip


def test_a_right_value_comes_back_as_its_types() -> None:
    found = decode(Outer, RIGHT, "a.json")
    assert found.sizes == (1, 2)
    assert found.rows == ((1.0, 2), (3.5,))
    assert found.inner == Inner(0.5)
    assert found.by_colour == {Colour("red"): 2.0}
    assert found.places == (Place(1, "b", 3), Place(0, "c"))
    assert found.pair == ("d", 4.0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": 3}, "name is 3: valid is a text"),
        ({"name": "\ud800"}, "half characters"),
        ({"sizes": [1, 0]}, "sizes[1] is 0: valid is an integer of 1 or more"),
        ({"sizes": [1, True]}, "sizes[1] is True: valid is an integer of 1 or more"),
        ({"sizes": [1, 10**5000]}, "sizes[1] is a huge number"),
        ({"sizes": [1]}, "is wrong: 1 sizes and 2 rows"),
        ({"sizes": 7}, "sizes is 7: valid is a list"),
        ({"rows": [[1.0], [1.0, math.nan, 2.0]]}, "rows[1][1] is nan: valid is a number that is finite"),
        ({"rows": [[1.0], [math.inf]]}, "rows[1][0] is inf"),
        ({"rows": [[1.0], "ab"]}, "rows[1] is 'ab': valid is a list"),
        ({"costs": {"launch": -1}}, "costs.launch is -1: valid is a number of 0 or more"),
        ({"costs": {"a b\x1b": -1}}, r"costs.'a b\x1b' is -1"),
        ({"costs": [1]}, "costs is a list of 1: valid is an object"),
        ({"inner": {"value": 1.5}}, "inner.value is 1.5: valid is a number from 0 to 1"),
        ({"inner": {"basis": "measured"}}, "inner.value is missing"),
        ({"each": {"x": {"value": 1, "basis": "guess"}}}, "basis is 'guess': valid is one of measured, datasheet"),
        ({"by_colour": {"blue": 1.0}}, "by_colour has a field that is 'blue': colour 'blue': known are red, green"),
        ({"places": [[1]]}, "places[0] is a list of 1: valid is a list of 2 to 3"),
        ({"places": [[-1, "b"]]}, "places[0].row is -1"),
        ({"pair": ["d", "e"]}, "pair[1] is 'e'"),
        ({"extra": {"x": [math.nan]}}, "extra.x[0] is nan"),
        ({"is_hot": 1}, "is_hot is 1: valid is true or false"),
        ({"name": "x" * 2_000_000}, "is a text of 2,000,000 characters"),
    ],
)
def test_what_is_wrong_is_told_with_its_path_value_and_what_is_valid(change: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError) as fault:
        decode(Outer, {**RIGHT, **change}, "a.json", hint="make it again")
    assert told in str(fault.value)
    assert str(fault.value).startswith("a.json: ")
    assert str(fault.value).endswith("; make it again")
    assert len(str(fault.value)) < 300


def test_a_typed_dict_is_checked_and_stays_what_it_was() -> None:
    row: dict[str, Any] = {
        "key": "gemm",
        "seconds": None,
        "samples": [1e-3, 2e-3],
        "status": "ok",
        "of_a_later_version": {},
    }
    assert decode(Reading, row, "m.jsonl") is row
    for wrong, told in (
        ({"seconds": 1.0}, "key is missing"),
        ({"key": "a", "seconds": 0.0}, "seconds is 0.0: valid is a number above 0"),
        ({"key": "a", "samples": [1.0, -1.0]}, r"samples\[1\] is -1.0"),
        ({"key": "a", "status": ["ok"]}, "status is a list of 1: valid is one of ok, oom"),
        ([], "is a list of 0: valid is an object"),
    ):
        with pytest.raises(DataError, match=told):
            decode(Reading, wrong, "m.jsonl")


def test_a_condition_of_its_own_is_told_in_its_words() -> None:
    even: Any = Annotated[int, Valid(lambda n: n % 2 == 0, "an even number")]
    assert decode(even, 4, "a.json") == 4
    with pytest.raises(DataError, match="is 3: valid is an even number"):
        decode(even, 3, "a.json")


class Circle(TypedDict):
    kind: Literal["circle"]
    radius: Positive


class Square(TypedDict):
    kind: Literal["square"]
    side: Positive


def by_kind(value: Any) -> Any:
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind not in ("circle", "square"):
        raise refused(kind, "circle or square", "kind")
    return Circle if kind == "circle" else Square


def test_a_type_that_follows_from_the_value_decides_what_is_wrong() -> None:
    figures: Any = Sequence[Annotated[dict[str, Any], ByValue(by_kind)]]
    right = [{"kind": "square", "side": 1}, {"kind": "circle", "radius": 2}, {"kind": "square", "side": 3}]
    assert decode(figures, right, "a.json") is right
    for value, told in (
        ({"kind": "square", "side": 0}, r"a.json: \[3\].side is 0: valid is a number above 0"),
        ({"kind": "oval"}, r"\[3\].kind is 'oval': valid is circle or square"),
    ):
        with pytest.raises(DataError, match=told):
            decode(figures, [*right, value], "a.json")


def test_what_is_kept_is_checked_and_stays_as_the_file_has_it() -> None:
    pairs: Any = Annotated[list[Any], Kept(list[tuple[str, Positive]])]
    right = [["a", 1.0], ["b", 2.0]]
    assert decode(pairs, right, "a.json") is right
    with pytest.raises(DataError, match=r"\[1\]\[1\] is -1"):
        decode(pairs, [["a", 1.0], ["b", -1]], "a.json")


def test_of_many_values_each_wrong_one_is_told_and_the_others_are_decoded() -> None:
    values: list[Any] = [{"value": 0.5}] * 600
    values[3], values[500], values[599] = {"value": 2}, {}, 7
    found = decode_each(Inner, values)
    assert [place for place, one in enumerate(found) if isinstance(one, Wrong)] == [3, 500, 599]
    assert [str(found[place]) for place in (3, 500, 599)] == [
        "value is 2: valid is a number from 0 to 1", "value is missing", "is 7: valid is an object",
    ]  # fmt: skip
    assert found[0] == found[598] == Inner(0.5)


def test_a_file_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for schema, told in ((2, "schema 2 is newer than this flopcast reads .1.: upgrade"), ("1", "`schema` of 1 is exp")):
        path.write_text(json.dumps({**RIGHT, "schema": schema}))
        with pytest.raises(DataError, match=told):
            load(Outer, path, "an outer", hint="make it", schema=1)
    path.write_text(json.dumps({**RIGHT, "schema": 1}))
    assert load(Outer, path, "an outer", hint="make it", schema=1).name == "a"


def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(80):
            file.write(bytes(1 << 20))
    with pytest.raises(DataError, match="holds more than 64 MiB, decompressed; make it"):
        load(Outer, path, "an outer", hint="make it")
    path.write_bytes(gzip.compress(b"[" + b"[]," * 2_000_001 + b"[]]"))
    with pytest.raises(DataError, match="more than 2,000,000 objects and lists"):
        load(Outer, path, "an outer", hint="make it")
    for depth in (200, 100_000):
        record = {**RIGHT, "extra": None}
        path.write_bytes(
            gzip.compress(json.dumps(record).replace("null", '{"x":' + "[" * depth + "]" * depth + "}").encode())
        )
        with pytest.raises(DataError, match="nested"):
            load(Outer, path, "an outer", hint="make it")


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b'{"a": NaN}', b'{"a": -Infinity}', b"1" * 5000, b"\x1f\x8b torn"]
)
def test_what_is_no_json_is_refused_in_words(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(DataError, match=r"a\.json (is not an outer|cannot be read): .*; make it$"):
        load(Outer, path, "an outer", hint="make it")


def test_a_torn_gzip_is_refused_and_two_members_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    whole = gzip.compress(json.dumps(RIGHT).encode())
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match="torn"):
        load(Outer, path, "an outer", hint="make it")
    path.write_bytes(gzip.compress(b"ab") + gzip.compress(b"cd"))
    assert files.read(path) == b"abcd"


def test_long_and_odd_values_are_shown_short_and_escaped() -> None:
    assert show("\x1b[31mred") == r"'\x1b[31mred'"
    assert len(show("x" * 100_000)) <= 60
    assert show(10**5000) == "a huge number"


# --- properties

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
sized = st.lists(st.tuples(st.integers(1, 1 << 40), st.lists(st.floats(-1e30, 1e30), max_size=3)), max_size=4)


@st.composite
def outers(draw: st.DrawFn) -> Outer:
    both = draw(sized)
    inner = st.builds(Inner, st.floats(0, 1), st.sampled_from(["measured", "datasheet"]))
    return Outer(
        draw(names), tuple(size for size, _ in both), tuple(tuple(row) for _, row in both),
        draw(st.dictionaries(names, st.floats(0, 1e30), max_size=3)), draw(st.none() | inner),
        draw(st.dictionaries(names, inner, max_size=2)), {},
        tuple(draw(st.lists(st.builds(Place, st.integers(0, 9), names, st.none() | st.integers(-5, 5)), max_size=2))),
        (draw(names), draw(st.floats(-1, 1))), draw(st.dictionaries(names, st.none() | st.integers(-9, 9), max_size=2)),
        draw(st.booleans()),
    )  # fmt: skip


@given(outers())
def test_what_is_written_is_read_back(value: Outer) -> None:
    assert decode(Outer, parse_json(json.dumps(asdict(value))), "a.json") == value


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(outers(), st.data(), anything)
def test_any_field_changed_is_refused_with_its_path_or_gives_a_right_value(
    value: Outer, data: st.DataObject, other: Any
) -> None:
    record = json.loads(json.dumps(asdict(value)))
    place: Any = record
    while True:
        at = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not (isinstance(place[at], list | dict) and place[at] and data.draw(st.booleans())):
            break
        place = place[at]
    place[at] = other
    told = ""
    try:
        found = decode(Outer, record, "a.json")
    except DataError as fault:
        told = str(fault)
    if told:
        assert told.startswith("a.json: ")
        is_object = "{" in json.dumps(other)  # only where one is given can it be without a field
        assert (
            "valid is" in told or "is wrong" in told or "known are" in told  # `Colour`'s own words
            or (is_object and told.endswith(" is missing"))
        )  # fmt: skip
        assert len(told) < 400
        return
    text = json.dumps(asdict(found), allow_nan=False)
    text.encode()
    assert decode(Outer, json.loads(text), "a.json") == found
