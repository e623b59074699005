"""The article's claims: verdicts follow from the intervals, and the page says what was found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import pytest

from flopcast.roofline.dollars.curves import HOSTS, OWN
from flopcast.roofline.dollars.points import CostCurve, CostPoint, StepPoint, cost_curve
from flopcast.roofline.gpu.catalogue.prices import Price
from studies.claims.claims import (
    A100,
    A100_NEVER,
    BATCH,
    FAILS,
    H100,
    H100_ABOVE,
    HOLDS,
    L4,
    L4_BELOW,
    OPEN,
    PriceSet,
    reason,
    test_claims,
)
from studies.claims.report import LAWS, Gathered, claim_rows, price_sets, section, why, write

SIZES = (1e8, 4e8, 1e9, 2e9)  # two below 2^29, two above


def price(gpu: str, usd: float) -> Price:
    return Price(gpu=gpu, provider="Me", kind="on-demand", usd_per_hour=usd, date=date(2025, 11, 15),
                 date_inferred=False, source="test")  # fmt: skip


def prices(l4: float, a100: float, h100: float) -> PriceSet:
    return PriceSet("mine", {gpu: price(gpu, usd) for gpu, usd in ((L4, l4), (A100, a100), (H100, h100))})


def points(gpu: str, seconds: Sequence[float], error: float, bound: str = "memory", fits: int = 9) -> list[StepPoint]:
    return [
        StepPoint(n_params=int(n), width=1024, depth=5, step_seconds=s, low=s / error, high=s * error,
                  flops_counted=6 * n * 1024, tokens=1024, bound=bound, fits=i < fits, device_seconds=s / 2)
        for i, (n, s) in enumerate(zip(SIZES, seconds, strict=True))
    ]  # fmt: skip


# the L4 in proportion to size, the others flatter: at 1 : 4 : 8 dollars the L4 leads below, the H100 above
SECONDS = {L4: (0.1, 0.4, 1.0, 2.0), A100: (0.06, 0.13, 0.25, 0.5), H100: (0.04, 0.06, 0.08, 0.12)}
FLAT = prices(1.0, 4.0, 8.0)


def ladder(error: float, seconds: Mapping[str, Sequence[float]] = SECONDS, fits: int = 9) -> list[CostCurve]:
    return [
        cost_curve(gpu, points(gpu, s, error, fits=fits if gpu == L4 else 9), price(gpu, 1.0), "projected")
        for gpu, s in seconds.items()
    ]


def verdicts(error: float, sold: PriceSet = FLAT, fits: int = 9) -> dict[str, str]:
    rows = test_claims(ladder(error, fits=fits), {}, sold, law="printed", hosts="own")
    return {row["claim"]: row["verdict"] for row in rows}


def test_narrow_intervals_decide_every_claim() -> None:
    assert verdicts(1.001) == {L4_BELOW: HOLDS, H100_ABOVE: HOLDS, A100_NEVER: HOLDS}
    cheap_a100 = prices(1.0, 0.5, 8.0)
    assert verdicts(1.001, cheap_a100) == {L4_BELOW: FAILS, H100_ABOVE: FAILS, A100_NEVER: FAILS}


def test_wide_intervals_decide_none() -> None:
    assert set(verdicts(30.0).values()) == {OPEN}
    assert set(verdicts(30.0, prices(1.0, 0.5, 8.0)).values()) == {OPEN}


def test_one_model_against_it_is_enough() -> None:
    """At 1 : 3 dollars the A100 beats the L4 at 4e8 parameters (0.13 s for 0.4) and not at 1e8 (0.06 for 0.1)."""
    (row, *_) = test_claims(ladder(1.001), {}, prices(1.0, 3.0, 80.0), law="printed", hosts="own")
    assert (row["verdict"], row["models"], row["decided_for"], row["decided_against"]) == (FAILS, 2, 1, 1)
    assert (row["gpu"], row["rival"], row["n_params"]) == (L4, A100, 4e8)
    assert row["ratio"] == pytest.approx(0.13 * 3 / 0.4)
    # the price of an L4 in A100s at which both are equal there: it depends on speed alone
    assert row["break_even"] == pytest.approx(0.13 / 0.4)
    assert row["price_ratio"] == pytest.approx(1 / 3)
    assert row["break_even_low"] < row["break_even"] < row["price_ratio"]


def test_a_gpu_out_of_memory_is_not_compared() -> None:
    rows = test_claims(ladder(1.001, fits=1), {}, FLAT, law="printed", hosts="own")
    assert {row["claim"]: row["models"] for row in rows} == {L4_BELOW: 1, H100_ABOVE: 2, A100_NEVER: 4}


def test_a_batch_passes_the_lead() -> None:
    def batches(l4_seconds: float, error: float) -> dict[str, list[CostPoint]]:
        found: dict[str, list[CostPoint]] = {}
        for gpu, seconds in ((L4, l4_seconds), (H100, 0.1)):
            for tokens, fits in ((1024, True), (4096, gpu == H100)):
                step = StepPoint(n_params=10**8, width=1024, depth=5, step_seconds=seconds, low=seconds / error,
                                 high=seconds * error, flops_counted=1e12, tokens=tokens, fits=fits)  # fmt: skip
                found.setdefault(gpu, []).append(CostPoint(gpu, step, price(gpu, 1.0)))
        return found

    for seconds, error, verdict in ((2.0, 1.01, HOLDS), (0.2, 1.01, FAILS), (0.8, 1.5, OPEN)):
        row = test_claims(ladder(1.01), batches(seconds, error), FLAT, law="printed", hosts="own")[-1]
        assert (row["claim"], row["verdict"]) == (BATCH, verdict)
        assert row["ratio"] == pytest.approx(seconds / 0.1 / 8)  # at 1,024 tokens, the most that the L4 holds


def test_the_reason_names_what_bounds_each() -> None:
    l4, h100 = (
        CostPoint(gpu, points(gpu, SECONDS[gpu], 1.1, bound)[1], FLAT.prices[gpu])
        for gpu, bound in ((L4, "memory"), (H100, "host"))
    )
    text = reason(l4, h100)
    for part in ("the H100 waits for its host, idle 50%", "the L4 is bound by memory bandwidth",
                 "6.7 x as fast at 8 x the price", "11 x in memory bandwidth, 8.2 x in matrix peak"):  # fmt: skip
        assert part in text
    assert reason(h100, l4) == text
    assert "both wait for the host, so price decides" in reason(h100, h100)


def test_the_price_lists_are_those_of_their_days() -> None:
    article, newest, spot, serverless = price_sets()
    assert [p.usd_per_hour for p in article.prices.values()] == [0.39, 1.64, 2.69, 3.59]
    assert all(p.date > date(2026, 1, 1) for p in newest.prices.values())
    assert all(spot.prices[gpu].usd_per_hour < p.usd_per_hour for gpu, p in article.prices.items())
    assert list(serverless.prices) == [L4, A100, H100]  # no list of it names an H200


def test_the_folder_is_written_whole(tmp_path: Path) -> None:
    curves = ladder(1.2)
    batches = {gpu: [CostPoint(gpu, p.step, p.price) for p in c.points] for gpu, c in zip(SECONDS, curves, strict=True)}
    found = Gathered(
        {(law, hosts): curves for law in LAWS for hosts in HOSTS}, dict.fromkeys(HOSTS, batches), [FLAT], []
    )
    rows = claim_rows(found)
    assert len(rows) == 2 * (4 + 3)
    shown = section(found)
    assert [figure.name for figure in shown.figures] == ["claims", "batch"]
    assert list(shown.rows) == [row for row in rows if row["depth_law"] == LAWS[0] and row["hosts"] == OWN]
    assert len(shown.rows) == 4
    paths = write(found, tmp_path / "new", shown)
    assert all(path.is_file() for path in paths)
    text = (tmp_path / "new" / "README.md").read_text()
    kept = json.loads((tmp_path / "new" / "claims.json").read_text())["claims"]
    assert [row["claim"] for row in kept] == [row["claim"] for row in rows]
    for row in shown.rows:
        assert row["claim"] in text
        assert row["reason"] in text
        assert row | {"why": why(row)} in kept
    assert "python -m studies.claims --out reports/economics" in text
