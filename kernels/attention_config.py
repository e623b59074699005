"""Which tiles the Triton attention uses: a committed table of measured choices, a rule for the rest.

`data/attention_*.json`, one file per device, say for each kernel, head_dim and masking which tile was fastest at some
sequence lengths. A call takes the tile of the nearest length, in log2. Devices without a table, 32-bit operands and
whatever tensor-memory copies cannot serve go by `rule`. Nothing is timed at a call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypedDict

from flopcast.decode import load
from flopcast.kernels.matmul_configs import shared_memory_limit
from flopcast.kernels.shapes import DTYPE_BYTES, Attention

FORMAT = 1
FOLDER = Path(__file__).parent / "data"
KERNELS = ("forward", "dkdv", "dq")
HEAD_DIMS = (16, 32, 64, 128)  # 64 and 128 are tuned

# A causal backward at head_dim 128 takes one pass from so many tokens on for each query head of a key-value head, and
# below runs the two kernels: rows of a large group leave L2 between the tiles that use them, sooner where they are
# fetched slowly again. From there on one pass was up to 21% faster on an H200 and up to 18% on an H100, never more than
# 1.3% slower (`studies.kernels.trial`, both ways at 22 kinds of calls, none shorter than 2,048 tokens).
ONE_PASS_TOKENS = {"NVIDIA H200": 1024}
ONE_PASS_TOKENS_ELSEWHERE = 2048
ONE_PASS_LEAST = 1449  # tokens

_KEY = re.compile(
    r"(pointer|hopper)/(\d+)x(\d+)/w(\d+)s(\d+)(/pack)?(/pingpong)?(/single)?(?:/l2-(\d+))?"
    r"(/skip)?(/delta)?(/onepass)?"
)


@dataclass(frozen=True)
class Tile:
    """block_m query rows by block_n key rows.

    kind: "pointer" (plain Triton, any part) or "hopper" (Gluon; block_m is 128, and so is block_n for dK and dV: 64
    rows for each of two warpgroups). For the latter:
    pack: the two warpgroups of the forward take the same 64 rows of two heads of a group.
    pingpong: the warpgroups take turns at the matrix units.
    persistent: there are as many programs as the part has multiprocessors.
    skip: of dK and dV with block_m 64, one warpgroup leaves out the block of queries none of which sees its keys.
    delta: the kernel of dQ makes delta and the base-2 lse, also for that of dK and dV, instead of a third kernel.
    onepass: of dK and dV (block_m 64, num_stages 2): their kernel makes dQ on its way, by additions whose order differs
    from run to run, and none of dQ runs.
    l2_mib: MiB of L2 that the heads processed at a time may fill with what their tiles share; 0: all heads at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    kind: str = "pointer"
    pack: bool = False
    pingpong: bool = False
    persistent: bool = True
    l2_mib: int = 0
    skip: bool = False
    delta: bool = False
    onepass: bool = False

    @property
    def key(self) -> str:
        """E.g. hopper/128x128/w4s2/pack/pingpong/l2-16."""
        flags = ("/pack" * self.pack) + ("/pingpong" * self.pingpong) + ("/single" * (not self.persistent))
        flags += (f"/l2-{self.l2_mib}" if self.l2_mib else "") + "/skip" * self.skip + "/delta" * self.delta
        flags += "/onepass" * self.onepass
        return f"{self.kind}/{self.block_m}x{self.block_n}/w{self.num_warps}s{self.num_stages}{flags}"


def from_key(key: str) -> Tile:
    """The tile that `Tile.key` names. Raises ValueError for what is not such a key."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"no attention tile: {key!r}; e.g. hopper/128x128/w4s2/pack")
    kind, m, n, warps, stages, pack, pingpong, single, l2, skip, delta, onepass = match.groups()
    return Tile(
        int(m), int(n), int(warps), int(stages), kind, pack=pack is not None, pingpong=pingpong is not None,
        persistent=single is None, l2_mib=int(l2 or 0), skip=skip is not None, delta=delta is not None,
        onepass=onepass is not None,
    )  # fmt: skip


@dataclass(frozen=True)
class AttentionConfig:
    """One tile per Triton kernel."""

    forward: Tile
    dkdv: Tile
    dq: Tile


ONE_PASS = Tile(64, 128, 4, 2, "hopper", l2_mib=32, onepass=True)


def one_pass_from(group: int, device: str = "") -> int:
    """The length in tokens from which on a causal backward at head_dim 128 takes one pass, by the number of query heads
    of a key-value head, on a device as the driver calls it."""
    return max(ONE_PASS_LEAST, ONE_PASS_TOKENS.get(device, ONE_PASS_TOKENS_ELSEWHERE) * group)


def takes_one_pass(shape: Attention, device: str = "") -> bool:
    """Whether a backward by the Hopper kernels takes one pass, unless it is to be deterministic."""
    is_covered = shape.causal and shape.head_dim == 128
    return is_covered and shape.seq >= one_pass_from(shape.heads // shape.kv_heads, device)


def rule(shape: Attention, capability: tuple[int, int] = (9, 0), *, tma: bool = False) -> AttentionConfig:
    """Tiles by part, dtype and head_dim; checked for spills and shared memory by offline compilation.

    tma: part, Triton and operands allow the Hopper kernels.
    """
    if DTYPE_BYTES[shape.dtype] == 4:  # exact fp32, for tests: ordinary units, small tiles
        small = Tile(32, 32, 4, 1)
        return AttentionConfig(small, small, small)
    if tma and capability[0] == 9 and shape.head_dim in (64, 128):
        wide = shape.head_dim == 128
        return AttentionConfig(
            Tile(128, 128, 4, 2 if wide else 3, "hopper", pingpong=True),
            Tile(64, 128, 4, 3, "hopper", skip=shape.causal) if wide else Tile(128, 128, 4, 2, "hopper"),
            Tile(128, 128, 4, 2, "hopper", delta=wide and shape.causal),
        )
    if capability[0] == 9:
        if shape.head_dim <= 64:
            return AttentionConfig(Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2))
        return AttentionConfig(Tile(128, 128, 8, 2), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2))
    roomy = shared_memory_limit(capability) > 128 * 1024
    if shape.head_dim <= 64:
        return AttentionConfig(Tile(128, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2))
    if roomy:
        return AttentionConfig(Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2))
    return AttentionConfig(Tile(64, 32, 4, 2), Tile(32, 64, 8, 1), Tile(64, 32, 8, 1))


class Record(TypedDict):
    """A table as a file holds it: tiles by the place of a kernel and a sequence length."""

    format: Literal[1]
    device: str
    triton: str
    choices: dict[str, dict[str, str]]


@dataclass(frozen=True)
class Table:
    """The measured choices of one device."""

    device: str  # as the driver calls it
    triton: str
    choices: Mapping[str, Mapping[int, Tile]]  # "forward/128/causal" -> seq -> tile

    @classmethod
    def from_record(cls, record: Record) -> Table:
        """Raises ValueError for keys of no tile and sequence lengths that are none."""
        choices = {
            place: {int(seq): from_key(key) for seq, key in by_seq.items()}
            for place, by_seq in record["choices"].items()
        }
        if any(seq < 1 for by_seq in choices.values() for seq in by_seq):
            raise ValueError("a sequence has one element or more")
        return cls(record["device"], record["triton"], choices)

    def tile(self, kernel: str, shape: Attention) -> Tile | None:
        """The tile of the nearest measured sequence length; None where that head_dim and masking have none."""
        by_seq = self.choices.get(place_of(kernel, shape.head_dim, shape.causal))
        if not by_seq:
            return None
        return by_seq[min(by_seq, key=lambda seq: abs(math.log2(seq / shape.seq)))]


def place_of(kernel: str, head_dim: int, causal: bool) -> str:
    """The name under which a table keeps a kernel's tiles."""
    return f"{kernel}/{head_dim}/{'causal' if causal else 'full'}"


def read(path: Path) -> Table:
    """Raises DataError for a file that is no table."""
    return load(Table, path, "a table of attention tiles", hint="`python -m studies.kernels.attention_table` makes one")


@lru_cache(maxsize=1)
def tables() -> tuple[Table, ...]:
    """All shipped tables."""
    return tuple(map(read, sorted(FOLDER.glob("attention_*.json"))))


def find(device: str, triton: str) -> Table | None:
    """The table of this device, of this Triton version if there is one, else of the newest."""
    of_device = [table for table in tables() if table.device == device]
    same = [table for table in of_device if table.triton == triton]
    newest = sorted(same or of_device, key=lambda table: [int(x) for x in re.findall(r"\d+", table.triton)])
    return newest[-1] if newest else None


def config_for(
    shape: Attention, capability: tuple[int, int] = (9, 0), *, tma: bool = False, device: str = "", triton: str = "",
    deterministic: bool = False,
) -> AttentionConfig:  # fmt: skip
    """The tiles of a call, from the device's table or, for what is not in it, from `rule`.

    tma: part, Triton and operands allow the Hopper kernels; the table holds nothing else. deterministic: every bit is
    to be the same in every run.
    """
    table = find(device, triton) if tma and DTYPE_BYTES[shape.dtype] == 2 else None
    config = rule(shape, capability, tma=tma)
    if table is not None:
        for kernel in KERNELS:
            tile = table.tile(kernel, shape)
            if tile is not None:
                config = replace(config, **{kernel: tile})
    if config.dkdv.kind == "hopper" and not deterministic and takes_one_pass(shape, device):
        config = replace(config, dkdv=ONE_PASS)
    forward = config.forward
    if forward.pack and shape.heads // shape.kv_heads % 2:
        config = replace(config, forward=rule(shape, capability, tma=tma).forward)
    return config
