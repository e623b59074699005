"""How much of real steps the shipped profile has measured, and what is said where it has not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.coverage import coverage, floor_percent, holdings, with_sources
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.measured_model import MeasuredModel, keep
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import depth_for, load_config, make_config
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.tracer.trace import trace_module
from studies.shipped import coverage as shipped_coverage


@pytest.fixture(scope="module")
def h200() -> Profile:
    return find_profile("nvidia-h200")


@pytest.fixture(scope="module")
def small() -> MeasuredModel:
    return MeasuredModel(name="qwen3-0.6b", stream=get_stream(load_config("qwen3-0.6b"), Traced()))


def test_steps_that_fit_lie_in_measured_kinds(h200: Profile) -> None:
    """99% of the device time; `python -m studies.shipped.coverage` shows all that ship."""
    large = Traced(batch=8, seq=1024, optimizer="adamw-fused")
    steps = [(load_config("qwen3-0.6b"), large), (load_config("qwen3-1.7b"), Traced())]
    steps += [(make_config(width=width, depth=depth_for(width)), Traced()) for width in (256, 2304)]
    for config, traced in steps:
        found = coverage(h200, MeasuredModel(name="step", stream=get_stream(config, traced)))
        assert found.fits
        assert found.in_measured_kinds >= 0.99, found
        assert sum(found.shares.values()) == pytest.approx(1.0)
    vast = MeasuredModel(name="14 B parameters", stream=get_stream(load_config("qwen3-14b"), Traced()))
    assert not coverage(h200, vast).fits


def test_what_was_not_measured_is_named_with_its_share(h200: Profile, small: MeasuredModel) -> None:
    whole = coverage(h200, small)
    surfaces = {key: s for key, s in h200.surfaces.items() if key.op_class != "optimizer"}
    without = coverage(replace(h200, surfaces=surfaces), small)
    assert whole.in_measured_kinds > 0.99
    assert without.in_measured_kinds < 0.9
    assert without.shares["extrapolated"] > 0.1
    assert without.lacking[0][0].startswith("optimizer _foreach")
    share_lost = 1 - without.in_measured_kinds
    assert sum(share for _, share in without.lacking) <= share_lost + whole.shares["extrapolated"]


def test_a_part_counts_by_the_curve_that_it_is_taken_from(h200: Profile, small: MeasuredModel) -> None:
    """A kernel of which only hot runs were measured, and whose operands lie in L2, is one that was measured; of the
    rest of the time the other way about."""
    op = TimedOp("forward", "launch", 0.0, seconds=10.0, basis="extrapolated", hot_seconds=9.0, hot_basis="measured")
    assert op.parts == (("extrapolated", 1.0), ("measured", 9.0))
    assert replace(op, hot_seconds=0.0, hot_basis="").parts == (("extrapolated", 10.0),)
    whole = coverage(h200, small)
    assert whole.in_measured_kinds == pytest.approx(1 - whole.shares["extrapolated"])
    without = coverage(replace(h200, surfaces={k: s for k, s in h200.surfaces.items() if k.cache == "cold"}), small)
    # hot times are then cold ones by the class's ratio: no measurement of their kind
    assert sum(share for _, share in without.lacking) > 0.05
    assert without.in_measured_kinds == pytest.approx(1 - without.shares["extrapolated"])


def test_a_measured_kind_of_another_size_is_not_called_unmeasured(h200: Profile) -> None:
    """Products of 16 rows in fp32 are far from those measured, which are many."""
    stream = trace_module(torch.nn.Linear(64, 64), torch.zeros(16, 64), Traced(precision="fp32"))
    found = PricedStep(stream, Run(precision="fp32"), h200)
    said = [text for text in found.warnings if "gemm" in text]
    assert said
    assert all("of sizes far from those measured" in text for text in said)


def test_a_projected_profile_has_measured_nothing(small: MeasuredModel) -> None:
    found = coverage(find_profile("nvidia-l4"), small)
    assert found.shares == {"measured": 0.0, "interpolated": 0.0, "extrapolated": pytest.approx(1.0)}
    assert found.in_measured_kinds == 0.0


def test_a_profile_says_what_it_was_measured_for(h200: Profile, small: MeasuredModel, tmp_path: Path) -> None:
    rows = [
        {"key": "a", "status": "ok", "shape": {"kind": "gemm"}, "role": "fit", "cache": "cold"},
        {"key": "a", "status": "ok", "shape": {"kind": "gemm"}, "role": "fit", "cache": "hot"},
        {"key": "b", "status": "oom", "shape": {"kind": "gemm"}, "role": "fit"},
        {"key": "c", "status": "ok", "shape": {"kind": "gemm"}, "role": "holdout"},
        {"key": "scalar/launch", "status": "ok"},
    ]
    assert holdings(with_sources(h200, tmp_path, rows)) == "holds 1 shapes directly"
    keep(tmp_path, small)
    profile = with_sources(h200, tmp_path, rows)
    (source,) = profile.provenance["sources"]
    measured = coverage(h200, small).shares["measured"]
    assert source["basis_shares"]["measured"] == measured
    assert f"{floor_percent(measured)} of the device time of qwen3-0.6b 4x256 measured" in holdings(profile)
    assert Profile.from_json(profile.to_json()).provenance["sources"] == [source]


@pytest.mark.parametrize(("share", "text"), [(1.0, "100%"), (0.99996, "99.99%"), (0.5, "50%"), (0.0, "0%")])
def test_percentages_are_not_rounded_up(share: float, text: str) -> None:
    assert floor_percent(share) == text


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: MeasuredModel) -> None:
    monkeypatch.setattr(shipped_coverage, "qwen3_models", lambda kind: [small])
    monkeypatch.setattr("sys.argv", ["coverage", "nvidia-h200"])
    shipped_coverage.main()
    shown = capsys.readouterr().out
    assert "qwen3-0.6b" in shown
    assert "extrapolated" in shown
