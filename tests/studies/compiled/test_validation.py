"""Compiled steps that ran on an H200 and on H100s, beside their forecasts: a worse law of kernels, memory or timeline
fails here."""

from __future__ import annotations

from statistics import median

import pytest

from flopcast.roofline.step.priced_step import MANY_GRAPHS_TOLD
from flopcast.roofline.step.uncertainty import spreads
from flopcast.roofline.validation.architectures import architectures
from flopcast.roofline.validation.step_comparison import Part, StepComparison
from studies.beside_evidence import SETS_INTERVALS
from studies.compiled.another_torch import STEPS, plans_of
from studies.compiled.validate import MODES
from studies.compiled.validation import FOLDERS, breaks, compared, is_judged, kept_stream, launched, report
from studies.power import again
from studies.shipped.intervals import estimate

Steps = dict[str, list[StepComparison]]
H200, H100 = FOLDERS
ARCHITECTURES_ON_H100 = 19  # from there on in each mode
FIRST_ON_H100 = 12  # steps in each mode, of the first two machines


@pytest.fixture(scope="module")
def steps() -> Steps:
    return compared(H200, kept_stream)


@pytest.fixture(scope="module")
def elsewhere() -> Steps:
    return compared(H100, kept_stream)


def errors(parts: list[Part]) -> list[float]:
    return [abs(part.error) for part in parts if part.error is not None]


def unseen(rows: list[StepComparison]) -> list[StepComparison]:
    return [row for row in rows if row.step.error is not None and is_judged(row) and not breaks(row)]


@pytest.mark.parametrize("mode", MODES)
def test_device_time_and_memory_are_as_measured(steps: Steps, mode: str) -> None:
    rows = unseen(steps[mode])
    assert len(rows) >= 24
    device, peak = errors([row.device for row in rows]), errors([row.peak for row in rows])
    assert len(device) >= 23
    assert len(peak) == len(rows)
    assert median(device) <= 0.013
    assert max(device) <= 0.05
    assert median(peak) <= 0.01
    assert max(peak) <= 0.04
    # the rest are models whose parameters are no whole megabytes; the allocator may leave blocks of them whole
    others = [row.peak for row in rows if row.plan.name.startswith(("w", "llama", "qwen3", "mlp"))]
    assert len(others) >= 20
    assert max(errors(others)) <= 0.012
    assert median(errors(others)) <= 0.001
    # the logits' gradient, which one graph hands to the next, has the bytes of the embedding's
    (collision,) = (row.peak for row in steps[mode] if row.plan.name == "gpt2-w512-d3")
    assert abs(collision.error or 0.0) <= 0.005


def test_captured_steps_take_the_time_that_is_forecast(steps: Steps) -> None:
    found = errors([row.in_a_row for row in unseen(steps["compile-graphs"])])
    assert median(found) <= 0.018
    assert sorted(found)[-2] <= 0.055  # the last has products of odd widths


def test_compiled_steps_take_the_time_that_is_forecast(steps: Steps) -> None:
    """Those that meet the power limit are 2.4% too slow at the mean, on these two cards and the next two: by the law
    before, of which all cards' steps were 1.7% too fast at the mean of 20 and are now 0.2%, the median was 1.3%. Other
    cards' steps: `tests/studies/power`, and those that a seed drew.

    The two hosts are quicker than the shipped one, by which Qwen3s come out 15% long. While launches alone counted,
    GPT-2's and ResNet's steps hid it, whose gradients and convolutions were missing: the median was 11%, 2% of it long.
    Beside a host calibrated in the run they were 6.4% off at the median, and are 9.0% since what is known of entering
    graphs counts: the tiny models of these two processes say 95 to 206 launches, 76 drawn steps fewer."""
    rows = unseen(steps["compile"])
    device_bound = errors([row.in_a_row for row in rows if not row.is_host_bound])
    host_bound = errors([row.in_a_row for row in rows if row.is_host_bound])
    shipped = [row.profile_host_step for row in rows if row.is_host_bound]
    assert median(errors(shipped)) <= 0.14
    assert max(errors(shipped)) <= 0.175
    assert abs(median(part.error for part in shipped if part.error is not None)) <= 0.075
    assert median(device_bound) <= 0.023
    assert sorted(device_bound)[-2] <= 0.065
    assert median(host_bound) <= 0.09
    assert max(host_bound) <= 0.157


def test_steps_whose_layers_break_take_the_time_that_is_forecast(steps: Steps) -> None:
    """Mixtures of experts, which enter up to 166 graphs. Their products in fp32 are told by 210 more rows since 26
    November 2026: device time is 1.4% off at most (1.9% before), steps, a little too slow, 3.8% (2.5% before); 1.46%
    since attention with a mask is what calls with masks took, by which its own errors fell by half."""
    rows = [row for mode in MODES for row in steps[mode] if breaks(row)]
    assert len(rows) == 10
    assert sum(bool(row.step.is_within and row.profile_host_step.is_within) for row in rows) >= 9
    device_bound = [row for row in rows if not row.is_host_bound]
    assert max(errors([row.device for row in device_bound])) <= 0.0148
    assert median(errors([row.profile_host_step for row in device_bound])) <= 0.039
    host_bound = [row.profile_host_step.error or 0.0 for row in rows if row.is_host_bound]
    assert len(host_bound) == 4
    low, high = sorted(host_bound)[:: len(host_bound) - 1]
    assert f"{100 * -high:.0f} to {100 * -low:.0f}% short" in MANY_GRAPHS_TOLD
    assert median(host_bound) >= -0.17
    assert max(errors([row.peak for row in rows])) <= 0.009


@pytest.mark.parametrize(("mode", "middle"), [("compile", 0.04), ("compile-graphs", 0.03)])
def test_attention_takes_what_calls_with_masks_took_alone(steps: Steps, mode: str, middle: float) -> None:
    """A law that was fitted to five steps' calls was 5.6% off in captured steps, and 18% at worst. What is left of the
    others is of steps at a lower clock."""
    found = errors([row.parts["attention"] for row in unseen(steps[mode])])
    assert len(found) >= 20
    assert median(found) <= middle
    assert max(found) <= 0.11


def test_intervals_hold_what_they_say(steps: Steps) -> None:
    """And are no wider than that takes: were half as wide to hold as much, these would be too wide. Device times are
    those of both measurements: of the second, after a rest, they hold 40 of 46."""
    rows = [row for mode in MODES for row in unseen(steps[mode])]
    device = [row.device for row in rows if row.device.is_within is not None]
    both = device + [row.device for row in again.compared() if row.device.is_within is not None]
    assert len(both) > 90
    assert 0.85 <= sum(bool(part.is_within) for part in both) / len(both) <= 0.97
    assert median(part.interval_width or 0.0 for part in device) <= 0.1, "7% held 83% of steps drawn afterwards"
    assert sum(bool(row.profile_host_step.is_within) for row in rows) >= 0.9 * len(rows)


@pytest.mark.parametrize("mode", MODES)
def test_as_many_generated_kernels_are_launched_as_were_seen(mode: str) -> None:
    found = launched(H200, mode)
    assert len(found) >= 25
    broken = {name: pair for name, pair in found.items() if "moe" in name}
    assert len(broken) == 4
    assert all(abs(told - seen) <= 1 for told, seen in broken.values())
    found = {name: pair for name, pair in found.items() if name not in broken}
    assert len(found) >= 25
    off = {name: abs(told / seen - 1.0) for name, (told, seen) in found.items() if told != seen}
    assert len(off) <= 1
    assert max(off.values()) <= 0.04


@pytest.mark.parametrize("mode", MODES)
def test_the_law_of_generated_kernels_holds_on_a_gpu_it_was_not_fitted_on(elsewhere: Steps, mode: str) -> None:
    """Two H100s of two machines; products and attention are those of a profile of another."""
    rows = elsewhere[mode][:FIRST_ON_H100]
    assert len(rows) == 12
    device, generated = errors([row.device for row in rows]), errors([row.parts["generated"] for row in rows])
    assert median(device) <= 0.013
    assert max(device) <= 0.035
    assert median(generated) <= 0.0156
    assert max(generated) <= 0.032
    assert max(errors([row.peak for row in rows])) <= 0.005
    bound_by_device = errors([row.profile_host_step for row in rows if not row.is_host_bound])
    assert len(bound_by_device) >= 5
    assert max(bound_by_device) <= 0.03
    assert all(row.profile_host_step.is_within for row in rows)
    assert median(row.device.interval_width or 0.0 for row in rows) <= 0.2
    of_architectures = {plan.name for plan in architectures()}
    found = {name: pair for name, pair in launched(H100, mode).items() if name.split()[0] not in of_architectures}
    assert len(found) >= 19
    assert all(told == seen for told, seen in found.values())


@pytest.mark.parametrize("mode", MODES)
def test_other_families_on_an_h100_take_the_time_that_is_forecast(elsewhere: Steps, mode: str) -> None:
    """Seven steps of another H100. GPT-2's is held apart: of its products of 50,257 columns inductor padded others
    than on the H200, by which products are slower and memory is less. So is ResNet-50's device time, 3.2% too fast:
    its convolutions, 5.7% too long by the laws of before, had made up for generated kernels that are 6.5% too fast."""
    rows = elsewhere[mode][FIRST_ON_H100:ARCHITECTURES_ON_H100]
    assert len(rows) == 7
    (gpt2,) = (row for row in rows if row.plan.name == "gpt2")
    others = [row for row in rows if row is not gpt2]
    device, generated = errors([row.device for row in others]), errors([row.parts["generated"] for row in others])
    (resnet,) = (row for row in others if row.plan.name == "resnet50")
    assert -0.0325 <= (resnet.device.error or 0.0) <= 0
    assert abs(resnet.parts["gemm"].error or 0.0) <= 0.04
    assert median(errors([row.device for row in others if row is not resnet])) <= 0.0145
    assert max(device) <= 0.051
    assert median(generated) <= 0.031
    assert max(generated) <= 0.0831
    assert max(errors([row.peak for row in others])) <= 0.023
    assert max(errors([row.profile_host_step for row in others])) <= 0.102
    assert sum(bool(row.profile_host_step.is_within) for row in rows) >= 6
    assert -0.115 <= (gpt2.device.error or 0.0) <= -0.1
    assert 0.12 <= (gpt2.peak.error or 0.0) <= 0.13


def test_compiled_architectures_on_an_h100_take_the_time_that_is_forecast(elsewhere: Steps) -> None:
    """Fourteen of sixteen that ran; Falcon's and OPT's are refused. Their code is of another torch than the one that
    ran, which fuses a few operations otherwise."""
    rows = [row for row in elsewhere["compile"][ARCHITECTURES_ON_H100:] if row.step.error is not None]
    assert len(rows) == 14
    device, steps = errors([row.device for row in rows]), errors([row.profile_host_step for row in rows])
    assert median(device) <= 0.012
    assert max(device) <= 0.04
    assert max(errors([row.peak for row in rows])) <= 0.045, "Mistral's window, as a mask"
    assert median(steps) <= 0.024
    assert max(steps) <= 0.109, "Qwen2.5-0.5B and BLOOM, which the host all but bounds"
    assert sum(bool(row.profile_host_step.is_within) for row in rows) >= 13


@pytest.mark.parametrize("gpu", FOLDERS)
def test_the_page_is_what_the_measurements_give(steps: Steps, elsewhere: Steps, gpu: str) -> None:
    assert (FOLDERS[gpu] / "README.md").read_text() == report(gpu, steps if gpu == H200 else elsewhere)


def test_the_spread_of_hosts_that_ships_is_what_the_steps_give(steps: Steps) -> None:
    """And drawn ones, which take longer (`python -m studies.compiled.intervals`): by these alone it is wider, since of
    the eight that the host bounds most ran on hosts of another pace than their tiny models."""
    found, shipped = estimate([row for rows in steps.values() for row in rows]), spreads("compile")
    assert shipped.host_same_run == pytest.approx(0.145, abs=0.005)
    assert shipped.host_same_run < found.host_same_run < 0.4
    drawn = [plan for run in SETS_INTERVALS for plan in plans_of(STEPS / run)]
    assert len(drawn) == 103
    assert {*found.source["steps"], *(plan.name for plan in drawn)} < set(shipped.source["steps"])
