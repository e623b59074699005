"""The shape that a row of a measurement file says it is of, as `kernels.shapes.shape_to_json` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Required, TypedDict

from flopcast.bounds import Kept, Valid
from flopcast.decode import by_field
from flopcast.json_files import parse_json
from flopcast.kernels.shapes import AdamW, Attention, Count, CrossEntropy, Dtype, Gemm, RmsNorm, RopeQkNorm, SwiGlu


class _Operand(TypedDict):
    shape: Sequence[Count]
    stride: Sequence[Count]
    dtype: Dtype


Operands = Sequence[
    Annotated[_Operand, Valid(lambda one: len(one["shape"]) == len(one["stride"]), "as many sizes as strides")]
]


@lru_cache(maxsize=4096)
def _holds(kind: type, text: str) -> bool:
    return type(parse_json(text)) is kind


class _Call(TypedDict, total=False):
    op: Required[str]
    inputs: Required[Operands]
    outputs: Required[Operands]
    args: Annotated[str, Valid(lambda text: _holds(list, text), "a list of arguments as JSON")]
    kwargs: Annotated[str, Valid(lambda text: _holds(dict, text), "an object of arguments as JSON")]
    written: Sequence[Count]


def _writes_inputs(call: _Call) -> bool:
    return max(call.get("written", ()), default=-1) < len(call["inputs"])


_KINDS: dict[str, Any] = {
    "call": Annotated[_Call, Valid(_writes_inputs, "a call that writes inputs of its own")],
    **{
        kind.__name__.lower(): Annotated[dict[str, Any], Kept(kind)]
        for kind in (Gemm, Attention, RmsNorm, RopeQkNorm, SwiGlu, CrossEntropy, AdamW)
    },
}


Shape = Annotated[dict[str, Any], by_field("kind", _KINDS)]
