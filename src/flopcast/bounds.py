"""Words for what a type alone does not say of a value in a file: `Annotated[float, Within(0.0, 1.0)]`.

Marks of an `Annotated` type, which `flopcast.decode` holds to:

    Within(0.0, 1.0)       a number within bounds
    range(1, 9)            an integer among these
    ("nt", "nn")           one of these
    Valid(check, "words")  a decoded value for which the check is true
    ByValue(type_of)       decoded as the type that follows from the value itself
    Kept(type)             decoded as this type, but kept as the file has it
    any other type         what the file holds, where the code declares a wider one (a plain `dict` for a TypedDict)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

LARGE = 1e30  # more than any count, rate or size in SI units: products of a few stay finite


class Within(NamedTuple):
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


class Valid(NamedTuple):
    """`is_valid` of a decoded value, else it is refused with the words of `valid`. An `is_valid` that raises ValueError
    refuses with that error's words."""

    is_valid: Callable[[Any], bool]
    valid: str


class ByValue(NamedTuple):
    """`type_of` a value as the file has it; it raises `decode.Wrong` for one of no type."""

    type_of: Callable[[Any], Any]


class Kept(NamedTuple):
    kind: Any


Finite = Annotated[float, Within(-LARGE, LARGE)]
Positive = Annotated[float, Within(0.0, LARGE, above=True)]
NonNegative = Annotated[float, Within(0.0, LARGE)]
Seconds = Annotated[float, Within(0.0, 1e9, above=True)]
Share = Annotated[float, Within(0.0, 1.0)]
Deviation = Annotated[float, Within(0.0, 100.0)]  # of log seconds
Whole = Annotated[int, range(-(1 << 63), 1 << 63)]
Size = Annotated[int, range(1, 1 << 53)]
Count = Annotated[int, range(1 << 53)]
