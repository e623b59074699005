"""Which widths are checked with real steps: sets of neighbourhoods, and shapes of equal parameters.

A set is chosen before anything of it has been run, its forecasts are written and committed first
(`check.py`), and once it has been looked at it cannot judge a law that was changed since: then the next is
due. Set 1 is of 21 November 2026. Set 2 is of other sizes throughout, chosen the day after, before the law of products
was changed: a neighbourhood lies between two multiples of 64, so that most of its widths share them. Set 3, of that
day too, asks for issue 7's neighbourhoods and others at tokens and sides of their own. Between two multiples of 64 its
sizes were drawn, not chosen: one odd, one each of 2, 4 and 8, one of 16 (`drawn`).
`draws.py`, made after it, draws none within 16 of them.

Settings that the device bounds (thousands of tokens, fused AdamW, few layers): a step takes tens of milliseconds, and
what it loses is the device's.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.model.models import HEAD_DIM, Config, check_config, make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.widths import penalties
from flopcast.roofline.widths import shapes as widths_shapes
from flopcast.roofline.widths.penalties import AXES, Point, neighbours

GROUP = "widths"
REPEAT = "#2"  # ends the name of a second run
SHAPE_PREFIX = "shape-"
SHAPES = "equal parameters"  # stands for a neighbourhood in the table
SEED = 7
SIZES = ("width", "depth", "heads", "kv_heads", "ffn", "vocab")
HEAD_DIM_AXIS = "head_dim"  # of all heads together; `flopcast widths` trades it against their number


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """Sizes of one axis around a width. `unaligned`: what is held against the line between its neighbours."""

    name: str
    axis: str
    config: Config
    batch: int
    seq: int
    unaligned: tuple[int, ...]

    @property
    def values(self) -> tuple[int, ...]:
        """The unaligned sizes and the multiples of 64 beside them."""
        ends = {end for value in self.unaligned for end in neighbours(value, penalties.ALIGNED)}
        return tuple(sorted({*self.unaligned, *ends}))

    @property
    def run(self) -> Run:
        return Run(batch=self.batch, seq=self.seq, optimizer="adamw-fused")

    def config_of(self, value: int) -> Config:
        found = {**self.config, AXES.get(self.axis, self.axis): value}
        check_config(found)
        return found

    def plan(self, value: int) -> StepPlan:
        config = dict(self.config_of(value))
        return StepPlan(name=f"{self.name}-{value}", config=config, group=GROUP, **self.run.settings)


@dataclass(frozen=True, kw_only=True)
class CheckSet:
    """Neighbourhoods, and the shapes of `constraint` around `base` that have no more layers than it (the host bounds
    deeper ones): `first` of those forecast fastest, which a wrong order would show soonest, and `spread` of the rest,
    evenly by rank."""

    number: int
    neighbourhoods: tuple[Neighbourhood, ...]
    base: Config
    run: Run
    constraint: str
    first: int
    spread: int

    def shapes(self, profile: Profile) -> list[Point]:
        """The chosen shapes, fastest forecast first."""
        constraint = widths_shapes.parse_constraint(self.constraint)
        configs = widths_shapes.shapes_within(self.base, constraint, per_width=2)
        kept = [c for c in configs if c["num_hidden_layers"] <= self.base["num_hidden_layers"]]
        found = widths_shapes.survey_shapes(kept, self.run, profile)
        rest = len(found) - 1 - self.first
        evenly = (self.first + round(i * rest / (self.spread - 1)) for i in range(self.spread))
        return [found[i] for i in sorted({*range(self.first), *evenly})]


def drawn(rng: random.Random, below: int, shown: Container[int] = ()) -> tuple[int, ...]:
    """Sizes between `below` and the next multiple of 64 by set 3's rule: odd, of 2, 4, 8 and no higher power, of 16;
    none that an earlier set has `shown`."""
    ranges = [*(range(power, 64, 2 * power) for power in (1, 2, 4, 8)), (16, 32, 48)]
    return tuple(rng.choice([below + o for o in offsets if below + o not in shown]) for offsets in ranges)


def _model(
    width: int, depth: int, heads: int, kv_heads: int, ffn: int, vocab: int = 32_768, head_dim: int = HEAD_DIM
) -> Config:
    return make_config(
        width=width, depth=depth, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, head_dim=head_dim
    )


_FIRST = CheckSet(
    number=1,
    neighbourhoods=(
        Neighbourhood(
            name="hidden1024", axis="hidden", config=_model(1024, 4, 8, 4, 3072), batch=16, seq=1024,
            unaligned=(1000, 1023, 1025, 1026, 1032, 1056),
        ),
        Neighbourhood(
            name="hidden2048", axis="hidden", config=_model(2048, 2, 16, 8, 6144), batch=8, seq=1024,
            unaligned=(2040, 2047, 2049, 2052, 2064),
        ),
        Neighbourhood(
            name="hidden4096", axis="hidden", config=_model(4096, 2, 32, 8, 12_288), batch=4, seq=1024,
            unaligned=(4088, 4095, 4097, 4100, 4112),
        ),
        Neighbourhood(
            name="ffn8192", axis="ffn", config=_model(2048, 2, 16, 8, 8192), batch=8, seq=1024,
            unaligned=(8184, 8191, 8193, 8196, 8208, 8224),
        ),
        Neighbourhood(
            name="vocab50257", axis="vocab", config=_model(1024, 2, 8, 4, 3072, 50_257), batch=8, seq=1024,
            unaligned=(50_256, 50_257, 50_258, 50_260, 50_264),
        ),
        Neighbourhood(
            name="vocab151936", axis="vocab", config=_model(1024, 2, 8, 4, 3072, 151_936), batch=8, seq=1024,
            unaligned=(151_643, 151_646, 151_937, 151_940, 151_944),
        ),
    ),
    base=make_config(width=1024, depth=28, heads=16, kv_heads=8, ffn=3072),  # Qwen3-0.6B
    run=Run(batch=8, seq=1024, optimizer="adamw-fused"), constraint="params=600M±2%", first=0, spread=6,
)  # fmt: skip

_SECOND = CheckSet(
    number=2,
    neighbourhoods=(
        Neighbourhood(
            name="hidden768", axis="hidden", config=_model(768, 3, 6, 3, 2304), batch=16, seq=1024,
            unaligned=(769, 770, 776, 792),
        ),
        Neighbourhood(
            name="hidden1536", axis="hidden", config=_model(1536, 2, 12, 6, 4608), batch=12, seq=1024,
            unaligned=(1504, 1520, 1532, 1535),
        ),
        Neighbourhood(
            name="hidden2560", axis="hidden", config=_model(2560, 2, 20, 4, 7680), batch=6, seq=1024,
            unaligned=(2561, 2562, 2564, 2568, 2584),
        ),
        Neighbourhood(
            name="ffn3072", axis="ffn", config=_model(1024, 3, 8, 4, 3072), batch=12, seq=1024,
            unaligned=(3048, 3068, 3070, 3071),
        ),
        Neighbourhood(
            name="ffn6144", axis="ffn", config=_model(2048, 2, 16, 8, 6144), batch=8, seq=1024,
            unaligned=(6145, 6148, 6160, 6176),
        ),
        Neighbourhood(
            name="ffn11008", axis="ffn", config=_model(4096, 2, 32, 8, 11_008), batch=3, seq=1024,
            unaligned=(11_000, 11_004, 11_006, 11_007),
        ),
        Neighbourhood(
            name="vocab32001", axis="vocab", config=_model(2048, 2, 16, 8, 6144, 32_000), batch=8, seq=1024,
            unaligned=(32_001, 32_002, 32_008, 32_016),
        ),
        Neighbourhood(
            name="vocab50265", axis="vocab", config=_model(1024, 2, 8, 4, 3072, 50_265), batch=8, seq=1024,
            unaligned=(50_259, 50_265, 50_266, 50_268, 50_288),
        ),
        Neighbourhood(
            name="vocab100277", axis="vocab", config=_model(1024, 2, 8, 4, 3072, 100_277), batch=6, seq=1024,
            unaligned=(100_256, 100_276, 100_277, 100_280),
        ),
        Neighbourhood(
            name="vocab151655", axis="vocab", config=_model(1024, 2, 8, 4, 3072, 151_655), batch=5, seq=1024,
            unaligned=(151_645, 151_650, 151_652, 151_655, 151_664),
        ),
        Neighbourhood(
            name="head_dim96", axis=HEAD_DIM_AXIS, config=_model(2048, 2, 16, 8, 6144, head_dim=96), batch=4, seq=2048,
            unaligned=(80, 96, 112),
        ),
    ),
    base=make_config(width=1280, depth=8, heads=10, kv_heads=5, ffn=3840, vocab=100_352),
    run=Run(batch=8, seq=1024, optimizer="adamw-fused"), constraint="params=300M±2%", first=3, spread=3,
)  # fmt: skip

_THIRD = CheckSet(
    number=3,
    neighbourhoods=(
        Neighbourhood(
            name="hidden1024-3", axis="hidden", config=_model(1024, 4, 8, 4, 2816), batch=10, seq=1024,
            unaligned=(975, 978, 992, 1004, 1016),
        ),
        Neighbourhood(
            name="hidden1280-3", axis="hidden", config=_model(1280, 3, 10, 5, 3456), batch=32, seq=512,
            unaligned=(1282, 1289, 1320, 1328, 1340),
        ),
        Neighbourhood(
            name="hidden2048-3", axis="hidden", config=_model(2048, 2, 16, 4, 5632, 50_304), batch=6, seq=1024,
            unaligned=(2065, 2074, 2096, 2100, 2104),
        ),
        Neighbourhood(
            name="hidden3072-3", axis="hidden", config=_model(3072, 2, 24, 8, 8192), batch=3, seq=2048,
            unaligned=(3090, 3096, 3100, 3120, 3123),
        ),
        Neighbourhood(
            name="hidden4096-3", axis="hidden", config=_model(4096, 2, 32, 8, 11_008), batch=5, seq=1024,
            unaligned=(4034, 4040, 4044, 4057, 4080),
        ),
        Neighbourhood(
            name="ffn4864-3", axis="ffn", config=_model(896, 4, 7, 1, 4864), batch=14, seq=1024,
            unaligned=(4880, 4913, 4916, 4918, 4920),
        ),
        Neighbourhood(
            name="ffn8192-3", axis="ffn", config=_model(2560, 2, 20, 5, 8192), batch=4, seq=1024,
            unaligned=(8131, 8132, 8152, 8160, 8166),
        ),
        Neighbourhood(
            name="vocab50257-3", axis="vocab", config=_model(768, 2, 6, 6, 3072, 50_257), batch=12, seq=1024,
            unaligned=(50_244, 50_248, 50_270, 50_272, 50_303),
        ),
        Neighbourhood(
            name="vocab128256-3", axis="vocab", config=_model(2048, 2, 16, 4, 8192, 128_256), batch=3, seq=1024,
            unaligned=(128_282, 128_292, 128_304, 128_312, 128_319),
        ),
        Neighbourhood(
            name="vocab151936-3", axis="vocab", config=_model(896, 2, 7, 1, 4864, 151_936), batch=6, seq=1024,
            unaligned=(151_911, 151_912, 151_920, 151_924, 151_926, 151_960, 151_968, 151_975, 151_980, 151_990),
        ),
    ),
    base=make_config(width=1536, depth=6, heads=12, kv_heads=2, ffn=5376, vocab=65_536),
    run=Run(batch=8, seq=1024, optimizer="adamw-fused"), constraint="params=300M±2%", first=3, spread=3,
)  # fmt: skip

SETS = {found.number: found for found in (_FIRST, _SECOND, _THIRD)}


def all_neighbourhoods() -> dict[str, Neighbourhood]:
    """By name, of all sets."""
    return {place.name: place for found in SETS.values() for place in found.neighbourhoods}


def shape_plan(config: Config, run: Run) -> StepPlan:
    size = f"{config['hidden_size']}x{config['num_hidden_layers']}x{config['intermediate_size']}"
    return StepPlan(name=f"{SHAPE_PREFIX}{size}", config=dict(config), group=GROUP, **run.settings)


def plan_of(row: Mapping[str, str]) -> StepPlan:
    """The step of a row of the table, as read from CSV."""
    place = all_neighbourhoods().get(row["neighbourhood"])
    if place is not None:
        return place.plan(int(row["value"]))
    width, depth, heads, kv_heads, ffn, vocab = (int(row[name]) for name in SIZES)
    head_dim = int(row.get("head_dim") or HEAD_DIM)  # older tables have none
    run = Run(batch=int(row["batch"]), seq=int(row["seq"]), optimizer="adamw-fused")
    return shape_plan(_model(width, depth, heads, kv_heads, ffn, vocab, head_dim), run)


def plans(rows: Iterable[Mapping[str, str]], seed: int = SEED) -> list[StepPlan]:
    """The steps of a table of forecasts, as read from CSV: shuffled, so that no neighbourhood has the card's clocks to
    itself; the aligned ones, ends of all lines, and the shapes twice."""
    places = all_neighbourhoods()
    found = []
    for row in rows:
        plan, place = plan_of(row), places.get(row["neighbourhood"])
        found.append(plan)
        if place is None or int(row["value"]) not in place.unaligned:
            found.append(replace(plan, name=plan.name + REPEAT))
    random.Random(seed).shuffle(found)
    return found


def are_kernels_wanted(plan: StepPlan) -> bool:
    """Whether a step's kernels are timed too: of shapes the step itself is what counts."""
    return not plan.name.startswith(SHAPE_PREFIX)
