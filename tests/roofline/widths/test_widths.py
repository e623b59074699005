"""Widths: penalties against aligned neighbours, rules, shapes of equal parameters, figures, and the check's table."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from flopcast.errors import DataError, UsageError
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.records import records
from flopcast.roofline.base.csv_files import write_rows
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.model.models import load_config, make_config, n_params
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.figures.width_checks import read_checks
from flopcast.roofline.views.figures.widths import penalty_figure, sawtooth_figure
from flopcast.roofline.widths import measured_rules, penalties
from flopcast.roofline.widths import shapes as widths_shapes
from flopcast.roofline.widths.penalties import Penalty, Point, anchor_of, penalty, power_of_two, rule_of
from flopcast.roofline.widths.sawtooth import sawtooth_points, sawtooth_widths, wave_ends
from studies.widths import check, hindsight, products, sets
from studies.widths.sets import SETS

RUN = Run(batch=8, seq=1024, optimizer="adamw-fused")
MODEL = make_config(width=1024, depth=4, heads=8, kv_heads=4, ffn=3072, vocab=32_768)
WIDTHS = (960, 1016, 1020, 1023, 1024, 1025, 1032, 1056, 1088)


@pytest.fixture(scope="module")
def points(h200: Profile) -> list[Point]:
    """Forecasts of hidden sizes around 1024: one trace."""
    return penalties.survey("hidden", penalties.resized(MODEL, "hidden", WIDTHS), RUN, h200)


def made(value: int, seconds: float, errors: Mapping[Any, float] | None = None) -> Point:
    return Point(
        axis="hidden", value=value, config=MODEL, n_params=10**8, step_seconds=seconds, step_seconds_low=seconds,
        step_seconds_high=seconds, device_seconds=seconds, device_seconds_low=seconds, device_seconds_high=seconds,
        host_seconds=0.0, bound="matrix", flops=10**12, tokens=8192, peak_bytes=1, fits=True, extrapolated=0.0,
        layout_seconds={"nt": seconds / 2}, layout_flops={"nt": 10**11}, errors=errors or {},
    )  # fmt: skip


# --- penalties


def test_a_width_on_the_line_loses_nothing() -> None:
    found = penalty(made(1032, 1.125), made(1024, 1.0), made(1088, 2.0))
    assert found.step == pytest.approx(0.0)
    assert found.layouts["nt"] == pytest.approx(0.0)


def test_a_width_above_the_line_loses_what_lies_above() -> None:
    found = penalty(made(1056, 1.8), made(1024, 1.0), made(1088, 2.0))
    assert found.device == pytest.approx(1.8 / 1.5 - 1)
    assert (found.below, found.above, found.multiple) == (1024, 1088, 32)


def test_the_line_is_in_parameters() -> None:
    """Of a module they need not be linear in its width: a square layer halfway in width has 45% of what its neighbours
    differ by."""
    square = [replace(made(value, value**2 / 1e6), n_params=value**2) for value in (160, 128, 192)]
    found = penalty(*square)
    assert found.step == pytest.approx(0.0)
    assert found.device_high == pytest.approx(0.0)


def test_an_error_in_common_leaves_the_penalty_certain() -> None:
    """A shape that all three run, as wrong in each: only what differs is uncertain."""
    shared = [made(v, s, {"head": 0.1 * s}) for v, s in ((1056, 1.5), (1024, 1.0), (1088, 2.0))]
    assert penalty(*shared).device_high == pytest.approx(penalty(*shared).device)
    alone = penalty(made(1056, 1.5, {"own": 0.15}), *shared[1:])
    assert alone.device_high - alone.device > 0.1


@pytest.mark.parametrize(
    ("value", "multiple", "anchor"),
    [(1025, 1, 64), (1028, 4, 64), (1056, 32, 64), (1088, 64, 128), (1152, 128, 256), (1024, 256, None)],
)
def test_what_a_width_is_held_against(value: int, multiple: int, anchor: int | None) -> None:
    assert power_of_two(value) == multiple
    assert anchor_of(value) == anchor


def test_every_candidate_that_is_no_multiple_of_256_has_its_line() -> None:
    for axis, own in (("hidden", 1000), ("ffn", 3072), ("vocab", 50_257)):
        values = penalties.candidates({**MODEL, penalties.AXES[axis]: own}, axis)
        assert own in values
        near = [v for v in values if own - 64 <= v <= own + 64 and anchor_of(v)]
        assert near
        for value in near:
            assert set(penalties.neighbours(value, anchor_of(value) or 64)) <= set(values), value
        assert {power_of_two(v) for v in values} >= {1, 2, 4, 8, 16, 32, 64}


def test_the_rule_keeps_the_smallest_multiple_that_costs_nothing() -> None:
    def lost(value: int, device: float) -> Penalty:
        return Penalty(
            axis="hidden", value=value, multiple=power_of_two(value), below=0, above=1, step=device / 2,
            device=device, device_low=device, device_high=device, layouts={},
        )  # fmt: skip

    found = [lost(1025, 1.4), lost(1028, 0.7), lost(1032, 0.02), lost(1040, 0.004), lost(1056, 0.001)]
    rule = rule_of("hidden", found)
    assert (rule.multiple, rule.count) == (16, 3)
    assert rule.median == pytest.approx(0.7)
    assert (rule.worst, rule.worst_value, rule.best) == (1.4, 1025, 0.02)
    assert rule.step_worst == pytest.approx(0.7)
    small = rule_of("hidden", found[3:])  # of a module that takes no smaller multiple than 16
    assert (small.multiple, small.median) == (16, None)


def test_alignment_shows_in_a_step_of_the_h200(points: list[Point]) -> None:
    """Cliffs where rows stop to start at multiples of 16 bytes, and then of 4: in all three layouts."""
    found = {p.value: p for p in penalties.penalties_of(points)}
    assert found[1025].device > found[1020].device > 0.3 > 0.1 > found[1032].device > 0.0
    for layout in penalties.LAYOUTS:
        assert found[1023].layouts[layout] > found[1020].layouts[layout] > 0.5
    assert found[1025].device_low < found[1025].device < found[1025].device_high
    assert penalties.rule_of("hidden", list(found.values())).multiple >= 8


def test_the_step_hides_what_the_host_bounds(h200: Profile) -> None:
    from flopcast.roofline.widths.answer import answer

    small = answer(MODEL, Run(batch=4, seq=256, optimizer="adamw-fused"), h200, axes=("ffn",), with_shapes=False)
    assert small.is_host_bound
    says = small.host_words() or ""
    assert "the host bounds this step" in says
    assert "No width makes it faster" in says
    rule = small.rules["ffn"]
    assert rule.median is not None
    assert rule.step_median is not None
    assert rule.step_median < 0.3 * rule.median
    document = json.loads(json.dumps(small.to_json(), allow_nan=False))
    assert document["host"]["is_bound"] is True
    assert {p["axis"] for p in document["points"]} == {"ffn"}


def test_a_forward_that_the_host_bounds_is_slower_at_odd_widths(h200: Profile) -> None:
    """The device catches up where it waits for nothing else: unaligned widths show then, and the words say so."""
    from flopcast.roofline.widths.answer import answer

    model = make_config(width=4096, depth=4, vocab=32_768)
    run = Run(batch=1, seq=1024, precision="bf16")
    forward = answer(model, run, h200, axes=("hidden",), with_shapes=False, forward=True)
    assert max(p.step for p in forward.penalties["hidden"]) > forward.tolerated
    says = forward.host_words() or ""
    assert "the host bounds this forward" in says
    assert "No width makes it faster, and unaligned ones make it slower where" in says


# --- shapes


@pytest.mark.parametrize(("text", "params", "tolerance"), [
    ("params=600M±2%", 6e8, 0.02), ("params=600M+-2%", 6e8, 0.02), ("params = 0.6B +/- 12M", 6e8, 0.02),
    ("params=600M", 6e8, 0.02), ("params=1.7b±3", 1.7e9, 0.03), ("PARAMS=596049920±0.5%", 596_049_920, 0.005),
])  # fmt: skip
def test_constraints_are_read(text: str, params: float, tolerance: float) -> None:
    found = widths_shapes.parse_constraint(text)
    assert (found.params, found.tolerance) == pytest.approx((params, tolerance))


@pytest.mark.parametrize(
    "text", ["", "600M", "params=", "params=600M±", "params=0±2%", "params=600M±60%", "memory=80G", "params=6.0.0M"]
)
def test_other_constraints_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="600M±2%"):
        widths_shapes.parse_constraint(text)


def test_shapes_keep_to_the_constraint_and_to_multiples() -> None:
    constraint = widths_shapes.parse_constraint("params=600M±2%")
    found = widths_shapes.shapes_within(load_config("qwen3-0.6b"), constraint, {"ffn": 128})
    assert 10 <= len(found) <= widths_shapes.MOST
    assert len({c["num_hidden_layers"] for c in found}) > 5
    for config in found:
        assert abs(n_params(config) / 600e6 - 1) <= 0.02
        assert config["intermediate_size"] % 128 == config["hidden_size"] % 64 == 0
        assert config["num_attention_heads"] == 2 * config["num_key_value_heads"]
        assert 2 <= config["intermediate_size"] / config["hidden_size"] <= 5
    with pytest.raises(UsageError, match="no shape of 5e\\+04M"):
        widths_shapes.shapes_within(load_config("qwen3-0.6b"), widths_shapes.parse_constraint("params=50B"))


# --- rules from measurements


def test_rules_of_the_h200s_own_products(h200: Profile) -> None:
    compared = measured_rules.comparisons(h200)
    rules = {(r.multiple, r.layout): r for r in measured_rules.measured_rules(h200, compared)}
    assert rules[1, "all"].median > rules[4, "all"].median > 1.0 > rules[8, "all"].median > 0.0
    assert abs(rules[128, "all"].median) < 0.02
    odd = rules[1, "all"]
    assert odd.count == sum(rules[1, layout].count for layout in ("nt", "nn", "tn"))
    assert odd.best <= odd.low <= odd.median <= odd.high <= odd.worst
    assert odd.sentence.startswith("keep widths to a multiple of 64: odd ones cost ")
    worst = max((c for c in compared if c.multiple == 1), key=lambda c: c.penalty)
    assert odd.worst_shape == f"{worst.shape.m}x{worst.shape.n}x{worst.shape.k}"
    assert worst.seconds / worst.expected - 1 == pytest.approx(odd.worst)


# --- figures


def test_waves_end_where_their_tiles_fill_the_processors() -> None:
    ends = wave_ends(8192, 132, 512, 4096)
    assert [wave for wave, _ in ends] == list(range(1, len(ends) + 1))
    for wave, width in ends:
        blocks = 8192 // 128 * (width // 256)
        assert blocks <= wave * 132 < blocks + 8192 // 128


def test_the_sawtooth_shows_every_point(h200: Profile) -> None:
    drawn = sawtooth_points(h200, [w for w in sawtooth_widths(1024, 1152) if w < 1060])
    figure = sawtooth_figure(drawn, h200)
    assert figure is not None
    assert figure.svg.count("1025 (1): ") == 2  # in both panels
    assert "Odd sizes lose" in figure.caption
    assert figure.png.startswith(b"\x89PNG")
    assert sawtooth_figure([], h200) is None


# --- the check


@pytest.fixture(scope="module")
def committed(root: Path) -> list[dict[str, str]]:
    with (root / "reports/nvidia-h200/widths.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def root() -> Path:
    return Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("number", sorted(SETS))
def test_the_committed_table_says_what_was_measured(root: Path, number: int) -> None:
    """Penalties of the kernels again from the raw rows; every width of each neighbourhood is there, bad ones too."""
    folder = root / f"reports/nvidia-h200/width-steps/{number}"
    if not folder.is_dir():
        pytest.skip(f"the steps of set {number} have not been run yet")
    runs = [check.measured_of(rows) for rows in check.rows_in(folder)]
    table = root / "reports/nvidia-h200" / ("widths.csv" if number == 1 else f"widths-{number}.csv")
    with table.open(newline="", encoding="utf-8") as file:
        rows = {(row["neighbourhood"], row["value"]): row for row in csv.DictReader(file)}
    for place in SETS[number].neighbourhoods:
        for value in place.values:
            row = rows[place.name, str(value)]
            assert row["status"] == "ok"
            if value not in place.unaligned:
                continue
            below, above = int(row["below"]), int(row["above"])
            share = (value - below) / (above - below)
            own, *ends = (
                mean(median(samples) for run in runs for samples in run.device.get(f"{place.name}-{v}", ()))
                for v in (value, below, above)
            )
            measured = own / (ends[0] * (1 - share) + ends[1] * share) - 1
            assert float(row["penalty_measured"]) == pytest.approx(measured, abs=1e-6)
            error = float(row["penalty_forecast"]) - float(row["penalty_measured"])
            assert float(row["penalty_error"]) == pytest.approx(error, abs=1e-6)


def test_the_newest_forecasts_committed_before_their_steps_reach_the_goals(root: Path) -> None:
    """Set 3 by the laws of today: signs, multiples of 8 to 32, medians by kind, the recommended shape."""
    with (root / "reports/nvidia-h200/widths-3.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    judged = [row for row in rows if row["penalty_error"]]
    assert len(judged) == sum(len(place.unaligned) for place in SETS[3].neighbourhoods) == 55
    assert mean(row["right_sign"] == "true" for row in judged) >= check.GOAL_SIGN
    for kind, multiples in check.KINDS.items():
        errors = [abs(float(row["penalty_error"])) for row in judged if int(row["multiple"]) in multiples]
        assert len(errors) >= 11
        assert median(errors) <= check.GOAL_POINTS, kind
        if kind == "8, 16, 32":
            assert max(errors) <= check.GOAL_POINTS
    best = [float(row["slower_than_best"]) for row in rows if row["rank_forecast"] == "1"]
    assert len(best) == 1
    assert best[0] <= check.GOAL_SHAPE


def test_hindsight_is_of_every_width_that_was_run(h200: Profile, root: Path) -> None:
    """Of one neighbourhood a set: penalties measured as in the tables, forecasts those of the profile given."""
    steps = root / "reports/nvidia-h200/width-steps"
    found = hindsight.hindsight(
        h200, steps, {2: small(2, "ffn3072"), 3: small(3, "ffn8192-3"), 4: small(3, "vocab50257-3")}
    )
    assert {number: [row["value"] for row in rows] for number, rows in found.items()} == {
        2: [3048, 3068, 3070, 3071],
        3: [8131, 8132, 8152, 8160, 8166],
    }
    with (root / "reports/nvidia-h200/widths-3.csv").open(newline="", encoding="utf-8") as file:
        table = {(row["neighbourhood"], row["value"]): row for row in csv.DictReader(file)}
    for row in found[3]:
        before = table[row["neighbourhood"], str(row["value"])]
        assert row["penalty_measured"] == pytest.approx(float(before["penalty_measured"]), abs=1e-6)
        assert row["profile"].endswith(h200.provenance["to"])
    said = hindsight.by_set(found).splitlines()
    assert len(said) == 5
    assert "of 4 (" in said[2]
    assert said[-1].startswith("| all | ")
    assert "of 9 (" in said[-1]
    with pytest.raises(UsageError, match="has no steps of a set: valid are folders 1, 2, 3"):
        hindsight.hindsight(h200, root / "tests")


def test_steps_of_several_cards_lie_in_a_folder_of_folders(root: Path, tmp_path: Path) -> None:
    steps = root / "reports/nvidia-h200/width-steps"
    assert len(check.rows_in(steps / "2")) == 1
    runs = [check.measured_of(rows) for rows in check.rows_in(steps / "3")]
    assert len(runs) == 4  # two cards, twice
    assert len(check.shapes_of(runs)) == 6
    assert check.shapes_of([]) == ()
    with pytest.raises(DataError, match="does not exist"):
        check.rows_in(tmp_path)


def test_the_steps_of_the_table_are_run_aligned_ones_twice(committed: list[dict[str, str]]) -> None:
    plans = sets.plans(committed)
    names = [plan.name for plan in plans]
    assert len(set(names)) == len(names)
    assert {"hidden1024-1024", "hidden1024-1024#2", "vocab151936-151643"} <= set(names)
    assert "hidden1024-1025#2" not in names
    shapes = [name for name in names if name.startswith("shape-")]
    assert len(shapes) == 2 * SETS[1].spread
    by_name = {plan.name: plan for plan in plans}
    assert by_name["ffn8192-8193"].config["intermediate_size"] == 8193
    assert sets.are_kernels_wanted(by_name["hidden1024-1024#2"])
    assert not sets.are_kernels_wanted(by_name[shapes[0]])
    assert [p.name for p in sets.plans(committed, seed=8)] != names


def test_no_set_judges_what_an_earlier_one_has_shown() -> None:
    """Sets share no unaligned size of an axis, and each has odd ones, multiples of 2 or 4, and of 8 to 32."""
    seen: set[tuple[str, int]] = set()
    for chosen in SETS.values():
        mine = [(place.axis, value) for place in chosen.neighbourhoods for value in place.unaligned]
        assert not seen & set(mine)
        assert len(mine) == len(set(mine)) >= 24
        assert {power_of_two(value) for _, value in mine} == {1, 2, 4, 8, 16, 32}
        seen |= set(mine)


def small(number: int, name: str, **more: Any) -> Any:
    place = sets.all_neighbourhoods()[name]
    return replace(SETS[number], neighbourhoods=(replace(place, **more),))


def test_a_step_that_failed_keeps_its_row(h200: Profile) -> None:
    chosen = small(1, "vocab50257")
    (place,) = chosen.neighbourhoods
    config = make_config(width=1024, depth=4)
    shape = sets.shape_plan(config, chosen.run)

    def row(plan: Any, value: float | None, kind: str = "step") -> dict[str, Any]:
        key = plan.key if kind == "step" else plan.kernels_key
        status = "ok" if value else "oom"
        return {"key": key, "status": status, "value": value, "plan": {"name": plan.name, "config": plan.config}}

    def run(scale: float) -> check.Measured:
        rows = [row(shape, 0.1 * scale)]
        for value in place.values:
            seconds = None if value == 50_258 else scale * (2.0 if value == 50_257 else 1.0)
            rows += [row(place.plan(value), seconds), row(place.plan(value), seconds, "kernels")]
        return check.measured_of(rows)

    rows = check.forecasts(chosen, h200, [config])
    found = {r["value"]: r for r in check.judged(rows, [run(1.0), run(1.1)])}
    assert found[50_257]["penalty_measured"] == pytest.approx(1.0)
    assert found[50_257]["penalty_spread"] is None  # one sample a run
    assert found[50_257]["step_penalty_spread"] is None
    assert found[50_257]["step_seconds"] == pytest.approx(2.1)
    assert found[50_258]["status"] == "oom"
    assert found[50_258]["penalty_measured"] is None
    assert found[50_258]["penalty_forecast"] > 0.1
    said = check.summary(list(found.values()))
    assert said["judged"] == len(place.unaligned) - 1
    assert said["recommended_slower_than_best"] == 0.0


def test_forecasts_written_before_are_judged_as_they_stand(h200: Profile, tmp_path: Path) -> None:
    """Steps 1% above and below their mean at the aligned sizes: a penalty's error follows from it, and the forecasts
    are those of the file, whatever the profile would say."""
    chosen = small(2, "ffn3072", unaligned=(3071,))
    table = tmp_path / "t.csv"
    rows = check.forecasts(chosen, h200, [make_config(width=1280, depth=4)])
    write_rows(table, check.COLUMNS, [{**r, "penalty_forecast": 0.5 if r["below"] else None} for r in rows])
    before = check.read_table(table)
    with table.open(newline="") as file:
        plans = sets.plans(csv.DictReader(file))

    def measured(plan: Any) -> list[dict[str, Any]]:
        again = plan.name.endswith(sets.REPEAT)
        is_aligned = "3071" not in plan.name
        seconds = 1.6 if not is_aligned else 1.01 if again else 0.99
        shared = {"status": "ok", "value": seconds, "plan": {"name": plan.name, "config": plan.config}}
        ops = {"aten::mm": [seconds - 0.5, 9], "aten::add": [0.5, 4]}
        kernels = {**shared, "key": plan.kernels_key, "samples": [seconds] * 3, "ops": ops}
        return [{**shared, "key": plan.key}, kernels]

    run = check.measured_of(row for plan in plans for row in measured(plan))
    after = {r["value"]: r for r in check.judged(before, [run])}
    one = after[3071]
    assert one["penalty_forecast"] == 0.5
    assert one["penalty_measured"] == pytest.approx(0.6)
    assert one["penalty_error"] == pytest.approx(-0.1)
    assert one["time_error"] == pytest.approx(1.5 / 1.6 - 1)
    # each aligned pair differs by 2% of its mean: 1.41% for one value, and 3071 was run once
    share = (3071 - 3008) / 64
    spread = 0.02 / 2**0.5
    assert one["device_spread"] == pytest.approx(spread, rel=1e-3)
    ends = (spread * (1 - share), spread * share)
    expected = 1.6 * (spread**2 + (ends[0] ** 2 + ends[1] ** 2) / 2) ** 0.5
    assert one["penalty_spread"] == pytest.approx(expected, rel=1e-3)
    assert after[3008]["runs"] == after[3008]["device_runs"] == 2
    said = check.summary(list(after.values()))
    assert said["within_goal"] == 0.0
    assert said["spread_points"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("shape", "kind"), [
    (Gemm(m=8192, n=3072, k=1024, layout="nt"), ("none", "aligned")),
    (Gemm(m=8192, n=3071, k=1024, layout="nt"), ("result", "odd")),
    (Gemm(m=8192, n=1024, k=3070, layout="nt"), ("both", "2, 4")),
    (Gemm(m=8192, n=1024, k=3071, layout="nn"), ("a", "odd")),
    (Gemm(m=8192, n=3071, k=1024, layout="nn"), ("b", "odd")),
    (Gemm(m=3068, n=1024, k=8192, layout="tn"), ("a", "2, 4")),
    (Gemm(m=3080, n=1024, k=8192, layout="tn"), ("none", "aligned")),
])  # fmt: skip
def test_which_rows_of_a_product_are_misaligned(shape: Gemm, kind: tuple[str, str]) -> None:
    assert products.kind_of(shape) == kind


def test_a_split_product_is_one_with_its_fill_and_its_sum() -> None:
    kernels = [["Memset (Device)", 1.0], ["gemm_a", 2.0], ["splitKreduce_kernel", 0.5], ["gemm_b_splitK", 3.0]]
    assert products.joined(kernels) == [("gemm_a", 3.5), ("gemm_b_splitK", 3.0)]


def test_the_products_of_real_steps_are_told_one_by_one(h200: Profile, root: Path) -> None:
    """Equal products of a step repeat within 10% (the clock changes), so each has been given its own kernel."""
    raw = list(records.read(root / "reports/nvidia-h200/width-steps/2").rows)
    chosen = small(2, "ffn3072", unaligned=(3071,))
    found = products.products(chosen, h200, raw)
    assert {row["step"] for row in found} == {"ffn3072-3008", "ffn3072-3071", "ffn3072-3072"}
    alike: dict[tuple[Any, ...], list[float]] = {}
    for row in found:
        key = tuple(row[name] for name in ("step", "m", "n", "k", "layout"))
        alike.setdefault(key, []).append(row["seconds"])
    repeated = [times for times in alike.values() if len(times) > 2 and min(times) > 50e-6]
    assert len(repeated) > 10
    assert all(max(abs(t / median(times) - 1) for t in times) < 0.1 for times in repeated)
    odd = [row for row in products.summary(found) if row["rows"] == "odd"]
    assert {(row["layout"], row["misaligned"]) for row in odd} == {
        ("nt", "result"), ("nt", "both"), ("nn", "a"), ("nn", "b"), ("tn", "a"), ("tn", "b"),
    }  # fmt: skip
    assert all(abs(row["signed"]) < 0.25 for row in odd)
    with pytest.raises(DataError, match="products were launched"):
        products.products(chosen, h200, [{**row, "products": row["products"][:5]} for row in raw
                                                if row["key"].startswith("step_kernels/")])  # fmt: skip


def test_products_profiled_twice_are_means_with_their_spread(h200: Profile, root: Path) -> None:
    """Set 3's kernels were profiled twice: what one product took lies well within 5% of the mean."""
    chosen = small(3, "ffn8192-3", unaligned=(8131,))
    runs = check.rows_in(root / "reports/nvidia-h200/width-steps/3")
    found = products.products(chosen, h200, [row for rows in runs for row in rows])
    once = products.products(chosen, h200, runs[0])
    again = products.products(chosen, h200, runs[1])
    assert len(found) == len(once) == len(again) > 30
    odd = [i for i, row in enumerate(found) if row["step"] == "ffn8192-3-8131"]  # built once a run
    assert odd
    for i in odd:
        both = (once[i]["seconds"], again[i]["seconds"])
        assert found[i]["seconds"] == pytest.approx(mean(both))
        assert found[i]["spread"] == pytest.approx(abs(both[0] - both[1]) / 2**0.5 / mean(both))
        assert once[i]["spread"] is None
    assert median(row["spread"] for row in found) < 0.02
    assert all(row["spread"] is not None for row in products.summary(found))


def test_the_figure_of_penalties_tells_each(root: Path, committed: list[dict[str, str]]) -> None:
    figure = penalty_figure(
        [check for check in read_checks(root / "reports/nvidia-h200").sizes if check.set == "1"], "nvidia-h200"
    )
    assert figure is not None
    judged = [row for row in committed if row["penalty_measured"]]
    assert figure.svg.count("): measured ") == 2 * len(judged)  # in either panel
    assert penalty_figure([], "nvidia-h200") is None


def test_the_figure_of_all_sets_shows_the_newest_plainly(root: Path) -> None:
    folder = root / "reports/nvidia-h200"
    figure = penalty_figure(read_checks(folder).sizes, "nvidia-h200")
    assert figure is not None
    assert figure.alt.startswith("Forecast against measured penalties of 133 widths")
    assert figure.caption.index("Of set 3") < figure.caption.index("Of set 2") < figure.caption.index("Of set 1")
    assert "Faint: sets 1 and 2." in figure.caption
    assert "sets 2 and 3 before any step ran, set 1 by the profile of now" in figure.basis


# --- the command


def test_the_command(flopcast: Callable[..., Any], tmp_path: Path) -> None:
    out, figure = tmp_path / "w.csv", tmp_path / "w.svg"
    found = flopcast(
        "widths", "--gpu", "nvidia-h200", "--around", 1024, "--depth", 4, "--vocab", 32768, "--batch", 8, "--seq", 1024,
        "--optimizer", "adamw-fused", "--axis", "hidden", "--span", 64, "--constraint", "params=90M+-0.3%",
        "--out", out, "--figure", figure, "--json",
    )  # fmt: skip
    assert found.code == 0, found.err
    document = found.document
    assert document["rules"][0]["axis"] == "hidden"
    assert document["rules"][0]["multiple"] in (8, 16, 32, 64)
    assert all(89.7e6 <= shape["n_params"] <= 90.3e6 for shape in document["shapes"])
    assert document["shapes"]
    assert document["shapes"] == sorted(document["shapes"], key=lambda s: s["seconds_per_parameter"])
    assert document["measured_rules"][0]["multiple"] == 1
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(document["points"]) + len(document["shapes"])
    assert figure.read_text().startswith("<")


def test_the_table_for_inference(flopcast: Callable[..., Any]) -> None:
    found = flopcast(
        "widths", "--gpu", "nvidia-h200", "--around", 1024, "--depth", 4, "--batch", 8, "--seq", 1024,
        "--axis", "heads", "--no-shapes", "--forward-only", "--optimizer", "adamw-fused", "--precision",
        "autocast-bf16",
    )  # fmt: skip
    assert found.code == 0, found.err
    assert "autocast-bf16; forward" in found.out
    assert "forward, ms (90%)" in found.out
    assert "16/8 x 64" in found.out
    assert "Measured products of this GPU" in found.out


@pytest.mark.parametrize(("arguments", "says"), [
    ((), "no model: give --around"),
    (("--around", 1024, "--axis", "depth"), "valid are hidden, ffn, vocab, heads"),
    (("--around", 1024, "--constraint", "params=many"), "params=600M±2%"),
    (("--config", "gpt2"), "valid are qwen3, llama, mistral"),
    (("--around", 1024, "--axis", "ffn", "--figure", "f.png"), "--figure draws hidden sizes"),
    (("--around", 1024, "--figure", "f.pdf"), ".png or .svg"),
    (("--around", 1024, "--span", 5), "valid is 64 to 1024"),
    (("--around", 1024, "--out", "."), "is a folder: give a file in it"),
    (("--around", 1024, "--out", "/dev/null/w.csv"), "cannot be written"),
    (("--around", 1024, "--tolerate", 0), "above 0 and below 100"),
    (("--around", -4), "valid is an integer of at least 1"),
])  # fmt: skip
def test_bad_use(flopcast: Callable[..., Any], arguments: tuple[Any, ...], says: str) -> None:
    found = flopcast("widths", "--gpu", "nvidia-h200", *arguments)
    assert found.code == 2
    assert says in found.err
    assert "Traceback" not in found.err
