"""How well `--matmul best` and `--attention best` pick: the time of the pick over that of the faster backend.

    python -m studies.kernels.best [--gpu nvidia-h200] [--pairs reports/nvidia-h200/kernels.csv] [--out FILE.csv]
    python -m studies.kernels.best --pairs PAIRS.csv --picks PICKS.csv

Judged are the pairs that `studies.kernels.pairs` timed in one run, ours and a peer in turn. The profile is not fitted
to them; shapes that it has other measurements of are told apart (`known`). A product is one pick; an attention one pick
for both directions among the backends of which both were timed, each against ours: its time is the sum.

`--picks`: judged are the products' picks of this file instead, each of which `studies.kernels.pairs --only picks` timed
when it first came to the shape, in a process of its own.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from flopcast.kernels.matmul_chosen import Choice
from flopcast.kernels.shapes import Attention, Gemm
from flopcast.roofline.gpu.library.fastest import attention_choice, product_choice
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import SurfaceKey
from studies.command import parser_of

PAIRS = Path("reports/nvidia-h200/kernels.csv")
_PEERS = {"cublas": "torch"}  # as the pairs call them -> as the profile does


@dataclass(frozen=True)
class Pick:
    """One choice: what was picked and was faster; `loss` is the pick's time over the faster one's."""

    kernel: str
    key: str
    known: bool
    picked: str
    faster: str
    loss: float


def products(
    rows: Sequence[Mapping[str, str]], profile: Profile, choose: Choice | None = None
) -> Iterator[Pick]:  # fmt: skip
    """The products of pairs, picked by `choose`, by default as the profile says."""
    choose = choose or product_choice(profile)
    for row in rows:
        if row["kernel"] != "matmul" or row["status"] != "ok":
            continue
        shape = Gemm(
            m=int(row["m"]), n=int(row["n"]), k=int(row["k"]), dtype=row["key"].split("/")[2], layout=row["layout"]
        )
        seconds = {"triton": float(row["seconds"]), _PEERS[row["peer"]]: float(row["peer_seconds"])}
        yield _pick("matmul", shape.key, _known(shape, profile), choose(shape), seconds)


def read_picks(path: Path) -> Choice:
    """What a file of `studies.kernels.pairs --only picks` says of each shape."""
    with path.open(newline="", encoding="utf-8") as file:
        picked = {row["key"]: row["picked"] for row in csv.DictReader(file)}
    return lambda shape: picked[shape.key]


def attentions(rows: Sequence[Mapping[str, str]], profile: Profile) -> Iterator[Pick]:
    timed: dict[Attention, dict[tuple[str, str], float]] = defaultdict(dict)
    for row in rows:
        if row["kernel"] == "attention" and row["status"] == "ok":
            shape = _attention(row["key"])
            ours = timed[replace(shape, direction="fwd")]
            ours[row["peer"], shape.direction] = float(row["peer_seconds"])
            ours["triton", shape.direction] = float(row["seconds"])
    for shape, found in timed.items():
        backends = {backend for backend, _ in found if {(backend, "fwd"), (backend, "bwd")} <= found.keys()}
        picked = attention_choice(shape, profile)
        if len(backends) > 1 and picked in backends:
            seconds = {backend: found[backend, "fwd"] + found[backend, "bwd"] for backend in sorted(backends)}
            yield _pick("attention", shape.key, _known(shape, profile), picked, seconds)


def _attention(key: str) -> Attention:
    """The shape of `Attention.key`, "attention/DIRECTION/causal/DTYPE/b8h24k12s256d128"."""
    _, direction, kind, dtype, sizes = key.split("/")
    batch, heads, kv_heads, seq, head_dim = map(int, "".join(c if c.isdigit() else " " for c in sizes).split())
    return Attention(
        batch=batch, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=head_dim, causal=kind == "causal", dtype=dtype,
        direction=direction,
    )  # fmt: skip


def _known(shape: Gemm | Attention, profile: Profile) -> bool:
    """Whether the profile holds a measurement of ours at this very shape."""
    work = describe(shape)
    surface = profile.surfaces.get(SurfaceKey("triton", work.op_class, work.variant, "cold"))
    return surface is not None and work.features in surface.measured


def _pick(kernel: str, key: str, known: bool, picked: str, seconds: Mapping[str, float]) -> Pick:
    faster = min(seconds, key=seconds.__getitem__)
    return Pick(kernel, key, known, picked, faster, seconds[picked] / seconds[faster])


def summary(picks: Sequence[Pick]) -> Iterator[str]:
    """Per kernel and whether the profile knows the shape: geometric mean of the better's speed kept, and the least;
    beside it what each backend alone would keep is what it loses to the pick."""
    for kernel in ("matmul", "attention"):
        for known in (True, False):
            of = [pick for pick in picks if (pick.kernel, pick.known) == (kernel, known)]
            if of:
                mean = math.exp(-sum(math.log(pick.loss) for pick in of) / len(of))
                right = sum(pick.picked == pick.faster for pick in of)
                yield (
                    f"{kernel}, {'measured' if known else 'not measured'} by the profile: {len(of)} shapes, the faster "
                    f"one picked {right} times; its speed over the better one's {mean:.4f}, least "
                    f"{1 / max(pick.loss for pick in of):.3f}"
                )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--gpu", default="nvidia-h200")
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    parser.add_argument("--picks", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    profile = find_profile(options.gpu)
    choose = read_picks(options.picks) if options.picks else None
    with options.pairs.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    picks = [*products(rows, profile, choose), *attentions(rows, profile)]
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Pick)])
            writer.writeheader()
            writer.writerows(map(asdict, picks))
    print(*summary(picks), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
