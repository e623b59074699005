"""Which configuration of the Triton matmul a call gets: a committed table of measured choices, a rule for the rest.

`data/matmul_*.json`, one file per device, remade by `flopcast tune-kernels`, hold for each layout shapes (m, n, k) and
the configuration that was fastest there. A shape of the table gets its own; any other is decided by

1. the configurations of the NEAREST shapes of the table in that layout, by the distance in log2 of m, n and k,
   and those that the cost model (`matmul_configs.cost`) proposes for the shape itself are the options;
2. the cost model picks among them.

Each shape of the table left out in turn, what the rule picks takes 7% longer than the best timed (geometric mean of
356; 25% at the 90th percentile, 49% at most). Devices without a table, and operands that tensor-memory copies cannot
serve, go by the cost model alone. Nothing is timed at a call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from flopcast.decode import load
from flopcast.kernels.matmul_configs import (
    MatmulConfig,
    proposals,
    ranked,
    rated,
    shared_memory_limit,
    splits_of,
    tiles_for,
    with_group,
)
from flopcast.kernels.shapes import DTYPE_BYTES, Count, Dtype, Gemm, Layout, Size

FORMAT = 1
FOLDER = Path(__file__).parent / "data"
NEAREST = 4

_KEY = re.compile(
    r"(pointer|tma|gluon|drift|regs|turns)/(\d+)x(\d+)x(\d+)/w(\d+)s(\d+)/g(\d+)/(?:(stream)|k(\d+)(r?))/c(\d+)p(\d+)"
)


def from_key(key: str) -> MatmulConfig:
    """The configuration that `MatmulConfig.key` names. Raises ValueError for what is not such a key."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"no matmul configuration: {key!r}; e.g. tma/128x256x64/w8s4/g8/k1/c2p1")
    kind, m, n, k, warps, stages, group, stream, split, reduce, subtiles, per_sm = match.groups()
    return MatmulConfig(
        int(m), int(n), int(k), int(warps), int(stages), int(group), kind=kind,
        split=0 if stream else int(split), reduce=reduce == "r", subtiles=int(subtiles), per_sm=int(per_sm),
    )  # fmt: skip


class Record(TypedDict):
    """A table as a file holds it (`microbench.tuning.table`): the keys of its configurations, and by layout rows of m,
    n, k and the place of the shape's configuration among them."""

    format: Literal[1]
    device: str
    triton: str
    dtype: Dtype
    configs: list[str]
    shapes: dict[Annotated[str, Layout], list[tuple[Size, Size, Size, Count]]]


@dataclass(frozen=True)
class Table:
    """The measured choices of one device and one dtype."""

    device: str  # as the driver calls it
    triton: str
    dtype: str
    choices: Mapping[str, Mapping[tuple[int, int, int], MatmulConfig]]  # layout, (m, n, k)

    @classmethod
    def from_record(cls, record: Record) -> Table:
        """Raises ValueError for keys of no configuration, and shapes with one that the table does not list."""
        configs = [rated(from_key(key)) for key in record["configs"]]
        if max((row[3] for rows in record["shapes"].values() for row in rows), default=-1) >= len(configs):
            raise ValueError(f"a shape has a configuration beyond the {len(configs)} that it lists")
        choices = {
            layout: {(m, n, k): configs[index] for m, n, k, index in rows} for layout, rows in record["shapes"].items()
        }
        return cls(record["device"], record["triton"], record["dtype"], choices)


def read(path: Path) -> Table:
    """Raises DataError for a file that is no table."""
    return load(Table, path, "a table of matmul configurations", hint="`flopcast tune-kernels` makes one")


@lru_cache(maxsize=1)
def tables() -> tuple[Table, ...]:
    """All shipped tables."""
    return tuple(map(read, sorted(FOLDER.glob("matmul_*.json"))))


def find(device: str, triton: str, known: Sequence[Table] | None = None) -> Table | None:
    """The table of this device, of this Triton version if there is one, else of the newest."""
    of_device = [table for table in (tables() if known is None else known) if table.device == device]
    same = [table for table in of_device if table.triton == triton]
    return max(same or of_device, key=lambda table: _version(table.triton), default=None)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def distance(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    return math.dist([math.log2(x) for x in one], [math.log2(x) for x in other])


def stores_ragged(config: MatmulConfig) -> bool:
    """Whether a tile of the tensor-memory kernel may store C through pointers: 128 accumulators per thread and the
    addresses beside them spill, and blocks stored in pieces need more shared memory than there is."""
    small = config.block_m * config.block_n <= 64 * 32 * config.num_warps
    return config.kind == "tma" and small and config.subtiles == 1


def choose(
    shape: Gemm, sm_count: int, capability: tuple[int, int], *, tma: bool = False, table: Table | None = None
) -> MatmulConfig:
    """The configuration for a shape; `tma`: operands and part allow tensor-memory copies."""
    if not tma:  # whole tiles: the pointer kernel's split-K has run in the interpreter alone
        return ranked(tiles_for(shape.dtype, capability), shape, sm_count)[0]
    if shape.n % 8:  # C's rows are not of whole 16 bytes
        ragged = [tile for tile in tiles_for(shape.dtype, capability, tma=True) if stores_ragged(tile)]
        return ranked((c for t in ragged for c in splits_of(t, shape, sm_count)), shape, sm_count)[0]
    measured = table.choices.get(shape.layout, {}) if table is not None else {}
    place = (shape.m, shape.n, shape.k)
    if place in measured:
        return measured[place]
    options = proposals(shape, sm_count, capability, 1)
    nearest = sorted(measured, key=lambda other: distance(place, other))[:NEAREST]
    limit = shared_memory_limit(capability)
    options += [
        with_group(measured[other], shape, sm_count)
        for other in nearest
        if measured[other].shared_bytes(DTYPE_BYTES[shape.dtype]) <= limit
    ]
    return ranked(options, shape, sm_count)[0]
