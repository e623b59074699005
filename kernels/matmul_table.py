"""Which configuration of the Triton matmul a call gets: a committed table of measured choices, a rule for the rest.

`data/matmul_*.json`, one file per device, remade by `flopcast tune-kernels`, hold for each layout shapes (m, n, k) and
the configuration that was fastest there. A shape of the table gets its own; any other the one that is fastest by the
law of the tensor-memory kernels (`matmul_law`). Operands that tensor-memory copies cannot serve, and parts without
them, get a tile of the pointers' kernel by an estimate of its own. Nothing is timed at a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from flopcast.decode import load
from flopcast.kernels import matmul_law
from flopcast.kernels.matmul_configs import MatmulConfig, from_key, ranked_pointers, shared_memory_limit
from flopcast.kernels.shapes import Count, Dtype, Gemm, Layout, Size

FORMAT = 1
FOLDER = Path(__file__).parent / "data"


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
        configs = [from_key(key) for key in record["configs"]]
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


def choose(
    shape: Gemm, sm_count: int, capability: tuple[int, int], *, tma: bool = False, table: Table | None = None
) -> MatmulConfig:
    """The configuration for a shape; `tma`: operands and part allow tensor-memory copies."""
    if not tma:  # whole tiles: the pointer kernel's split-K has run in the interpreter alone
        return ranked_pointers(shape, sm_count, capability)[0]
    limit = shared_memory_limit(capability)
    measured = table.choices.get(shape.layout, {}) if table is not None else {}
    place = (shape.m, shape.n, shape.k)
    if place in measured:
        return measured[place]
    return matmul_law.fastest(shape, sm_count, limit)
