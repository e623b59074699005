"""The committed tables of inference, image models and fine-tuning: what they say holds; today's code still says it."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from statistics import median

import pytest

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.recipe.settings import QUANTISED
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.validation.compare_steps import StepsFolder, compare_folders
from flopcast.roofline.validation.step_comparison import Part, StepComparison
from studies.beside_evidence import REPORTS, is_seen, summary, was_timed_once
from studies.calls.optimizers import ROWS
from studies.compiled.another_torch import stream_of_its_torch

Table = list[dict[str, str]]
FIRST_RUN, SECOND_RUN = 18, 32  # calls of inference: those before were timed in five rounds, up to here in one
FOURTH_RUN, CAPTURED = 45, 63  # from here on with their kernels; from there on captured decodes


def rows_of(suite: str, gpu: str = "nvidia-h200", name: str = "validation.csv") -> Table:
    with (REPORTS[gpu] / suite / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def errors(rows: Table, column: str) -> list[float]:
    return [abs(float(row[column])) for row in rows if row[column]]


def test_calls_of_inference_are_as_far_off_as_the_guide_says() -> None:
    rows = rows_of("inference")[:FIRST_RUN]
    prefills = [row for row in rows if row["phase"] == "prefill" and row["bound"] != "host"]
    decodes = [row for row in rows if row["phase"] == "decode"]
    assert (len(prefills), len(decodes)) == (6, 11)
    assert median(errors(prefills, "step_error")) < 0.03
    assert max(errors(prefills, "step_error")) < 0.045
    assert median(errors(decodes, "step_error")) < 0.09
    assert max(errors([row for row in decodes if row["name"] != "gpt2"], "step_error")) < 0.15
    assert max(errors(rows, "peak_error")) < 0.033


def test_calls_timed_once_are_told_as_far_off_as_they_are() -> None:
    rows = rows_of("inference")[FIRST_RUN:SECOND_RUN]
    assert len(rows) == 14
    decodes = [float(row["step_error"]) for row in rows if row["phase"] == "decode"]
    assert len(decodes) == 11
    assert max(decodes) < 0
    assert -0.9 < min(decodes) < -0.8, "the guide says 84%"
    (recorded,) = (row for row in rows if row["device_error"])
    assert abs(float(recorded["device_error"])) < 0.02
    assert recorded["device_within"] == "true"


def test_kernels_of_calls_take_as_long_as_the_guide_says() -> None:
    rows = rows_of("inference")[FOURTH_RUN:CAPTURED]
    decodes, prefills = ([row for row in rows if row["phase"] == phase] for phase in ("decode", "prefill"))
    assert (len(decodes), len(prefills)) == (11, 7)
    assert median(errors(prefills, "device_error")) < 0.0135
    assert max(errors(prefills, "device_error")) < 0.0185
    assert median(errors(decodes, "device_error")) < 0.01205
    assert max(errors(decodes, "device_error")) < 0.0365


def test_captured_decodes_are_as_far_off_as_the_guide_says() -> None:
    rows = [row for row in rows_of("inference")[CAPTURED:] if row["mode"] == "compile-graphs"]
    assert len(rows) == 12
    large = rows[9:]  # which no mending has seen
    assert {row["name"] for row in large} == {"qwen3-4b", "qwen3-8b"}
    assert max(errors(large, "step_error")) < 0.0365, (
        "1.0% while copies of the cache, too quick, hid attention, too slow"
    )
    assert max(errors(large, "device_error")) < 0.038
    assert max(errors(large, "generated_error")) < 0.039
    assert median(errors(rows, "step_error")) < 0.0347
    assert max(errors(rows, "step_error")) < 0.12
    assert max(errors(rows, "device_error")) < 0.078
    assert max(errors(rows, "peak_error")) < 0.029


def test_compiled_decodes_are_as_far_off_as_the_guide_says() -> None:
    """Their host was not calibrated compiled, and is a quick one."""
    rows = [row for row in rows_of("inference")[CAPTURED:] if row["mode"] == "compile"]
    assert len(rows) == 3
    assert max(errors(rows, "device_error")) < 0.0645
    assert all(row["within_interval"] == row["within_interval_profile_host"] == "true" for row in rows)
    (bound_by_device,) = (row for row in rows if row["bound"] != "host")
    assert abs(float(bound_by_device["step_error"])) < 0.056
    assert max(errors(rows, "step_error_profile_host")) < 0.62


def test_calls_on_weights_of_few_bits_are_as_far_off_as_the_guide_says() -> None:
    rows = rows_of("quantised")
    assert len(rows) == 21
    by_kind = {
        kind: errors([row for row in rows if (row["phase"], row["base_dtype"]) == kind], "device_error")
        for kind in itertools.product(("decode", "prefill"), QUANTISED)
    }
    bounds = {
        ("decode", "fp8"): (0.04, 0.067), ("decode", "int8"): (0.027, 0.031), ("decode", "int4"): (0.0115, 0.038),
        ("prefill", "fp8"): (0.0245, 0.026), ("prefill", "int8"): (0.004, 0.005), ("prefill", "int4"): (0.016, 0.045),
    }  # fmt: skip
    for kind, (middle, worst) in bounds.items():
        assert median(by_kind[kind]) < middle, kind
        assert max(by_kind[kind]) < worst, kind
    assert max(errors(rows, "peak_error")) < 0.0255
    by_device = [row for row in rows if row["bound"] != "host"]
    assert max(errors(by_device, "step_error")) < 0.054
    assert all(row["within_interval"] == "true" for row in by_device)
    host_bound = errors([row for row in rows if row["bound"] == "host"], "step_error_profile_host")
    assert len(host_bound) == 13
    assert median(host_bound) < 0.14


def test_a_summary_sets_what_was_timed_once_apart() -> None:
    plan = StepPlan(name="qwen3-4b", config={}, phase="decode", context=64, group="inference")
    found = [
        StepComparison(plan, "ok", bound="host", rounds=rounds, step=Part(1.0, forecast))
        for rounds, forecast in ((5, 0.98), (1, 0.5))
    ]
    assert [was_timed_once(row) for row in found] == [False, True]
    assert [(row[0], row[1], row[3]) for row in summary(found)] == [
        ("bound by the host", "1", "2.0% / 2.0% (1)"),
        ("bound by the host, timed once", "1", "50.0% / 50.0% (1)"),
    ]


def test_image_models_are_as_far_off_as_the_guide_says() -> None:
    rows = rows_of("images")
    first, second, third, fourth = rows[:3], rows[3:17], rows[17:19], rows[19:]
    assert (len(second), len(third), len(fourth)) == (14, 2, 6)
    assert max(errors(fourth, "device_error")) < 0.046
    assert median(errors(fourth, "device_error")) < 0.027
    assert max(errors(fourth, "step_error")) < 0.373, "mobilenet_v2's host, whose pace moved twofold"
    assert max(errors(fourth, "peak_error")) < 0.004
    assert max(errors(third, "device_error")) < 0.048
    assert max(errors(third, "step_error")) < 0.034
    assert median(errors(second, "device_error")) < 0.034
    assert max(errors(second, "device_error")) < 0.072
    assert max(errors([row for row in second if row["bound"] != "host"], "step_error")) < 0.29, "resnet101's host"
    off = {row["name"]: float(row["step_error"]) for row in first}
    assert -0.14 < off.pop("mobilenet_v2@nhwc") < 0, "a tenth slower than in the second run, where it is 4% fast"
    assert all(-0.1 < error < 0 for error in off.values())
    assert max(errors(first, "peak_error")) < 0.005
    assert max(errors(rows, "peak_error")) < 0.036


def test_steps_in_other_precisions_are_as_far_off_as_the_guide_says() -> None:
    rows = rows_of("precisions")
    assert [row["precision"] for row in rows].count("autocast-bf16") == 0
    assert len(rows) == 8
    assert median(errors(rows, "device_error")) < 0.014
    assert max(errors(rows, "device_error")) < 0.087
    fp16 = [row for row in rows if row["precision"] == "autocast-fp16"]
    assert max(errors(fp16, "device_error")) < 0.022
    # that of Qwen3-0.6B in fp16, whose host is forecast a fifth too fast: device time that was 5.3% too long made up
    # for a part of it
    assert max(errors(rows, "step_error_profile_host")) < 0.106
    assert median(errors(rows, "step_error_profile_host")) < 0.027
    assert max(errors(rows, "peak_error")) < 0.003


def test_steps_that_checkpoint_selectively_are_as_far_off_as_the_guide_says() -> None:
    rows = rows_of("checkpoints")
    assert all(row["checkpoint"] == "selective" for row in rows)
    first, again = rows[:9], rows[9:]
    assert len(first) == 9, "four of them compiled"
    assert len(again) == 5, "on another machine, after the law was known"
    assert max(errors(rows, "device_error")) < 0.032
    assert max(errors(rows, "peak_error")) < 0.0005
    compiled = [row for row in first if row["mode"] == "compile"]
    assert max(errors([row for row in compiled if row["bound"] != "host"], "step_error")) < 0.023
    assert sorted(errors(again, "step_error"))[-2] < 0.047
    assert -0.131 < min(float(row["step_error"]) for row in again) < -0.1, "a GPT-2's, whose host is short"
    assert sum(row["within_interval"] == "true" for row in again) >= 4


def test_other_architectures_are_as_far_off_as_the_guide_says() -> None:
    everything = rows_of("architectures")
    assert len(everything) == 5 + 19
    rows = everything[:5]  # of the first machine
    unseen = [row for row in rows if row["name"] != "qwen3-next-d4"]
    assert max(errors(unseen, "device_error")) < 0.038
    assert max(errors(rows, "device_error")) < 0.056
    assert max(errors(rows, "peak_error")) < 0.0008
    assert max(errors(unseen, "step_error_profile_host")) < 0.1
    # attention of 256 columns: before any was measured it was forecast half as long as it is
    for row in everything:
        if row["name"] == "pythia-1b-d6":
            assert abs(float(row["attention_error"])) < 0.02
    rows = everything[5:]
    unseen = [row for row in rows if row["name"] not in ("qwen3-next-d4", "falcon-7b-d3")]
    assert median(errors(rows, "device_error")) < 0.015
    assert max(errors(rows, "device_error")) < 0.062, "Falcon's attention by parts"
    assert max(errors(rows, "step_error")) < 0.095, "the host of Qwen3-Next's loops"
    assert max(errors(unseen, "step_error")) < 0.06
    assert max(errors(unseen, "peak_error")) < 0.0015


def test_drawn_steps_are_as_far_off_as_the_guide_says() -> None:
    first, rows = (rows_of("random", name=name) for name in ("first.csv", "validation.csv"))
    assert len(first) == len(rows) == 6 * 24 + 17 + 11 + 22 + 14 + 20 + 26 + 21 + 18 + 19 + 12 + 4
    for found in (first, rows):
        eager = [row for row in found if row["mode"] == "eager"]
        assert len(eager) == 4 * 24
        assert median(errors(eager, "device_error")) < 0.0115
        assert median(errors(eager, "peak_error")) < (0.001 if found is rows else 0.0025)
        assert max(errors(eager, "peak_error")) < (0.015 if found is rows else 0.04)
        # attention in fp32, which was not yet measured; all others of the first two seeds are within 6%
        assert sorted(errors(eager[:48], "device_error"))[-1 if found is rows else -2] < 0.06
        assert max(errors(eager[48:], "device_error")) < 0.062
        assert median(errors([row for row in eager if row["bound"] != "host"], "step_error")) < 0.027
        assert median(errors([row for row in eager if row["bound"] == "host"], "step_error")) < 0.095
        inside = [row["within_interval"] == "true" for row in found if row["within_interval"]]
        assert sum(inside) / len(inside) > 0.85
    compiled = [row for row in rows if row["mode"] == "compile"]
    assert all(row["step_error"] for row in compiled)
    compiled, in_many_rounds = compiled[:-4], compiled[-4:]  # all bound by the host
    assert max(errors(in_many_rounds, "step_error")) < 0.13
    assert max(errors(in_many_rounds, "device_error")) < 0.042
    assert all(row["within_interval"] == row["device_within"] == "true" for row in in_many_rounds)
    compiled, last_of_all = compiled[:-12], compiled[-12:]
    compiled, thirteenth = compiled[:-19], compiled[-19:]
    compiled, blind = compiled[:-18], compiled[-18:]
    compiled, latest = compiled[:-21], compiled[-21:]
    compiled, newest = compiled[:-26], compiled[-26:]
    all_rested = compiled[-56:] + newest
    compiled, rested, last_drawn = compiled[:-56], compiled[-56:-20], compiled[-20:]
    compiled, fifth, sixth = compiled[:-35], compiled[-35:-11], compiled[-11:]
    lottery = [row for row in compiled if row["name"] in ("gpt2-d9", "gpt2-d3")]  # which of their products are padded
    assert len(lottery) == 2
    assert max(errors(lottery, "device_error")) < 0.2824
    assert max(errors(lottery, "peak_error")) < 0.26
    assert all(row["within_interval"] == row["device_within"] == "true" for row in lottery)
    compiled = [row for row in compiled if row not in lottery]
    single = next(row for row in compiled if row["precision"] == "autocast-fp16")
    assert max(errors([single], "device_error")) < 0.0096, "refused before its scaler was modelled"
    assert max(errors([single], "step_error")) < 0.0372
    (shortest,) = (row for row in compiled if row["name"] == "gpt2")  # 0.5 ms of a decode
    assert max(errors([shortest], "device_error")) < 0.1
    assert max(errors([row for row in compiled if row is not shortest], "device_error")) < 0.0653
    assert max(errors(compiled, "peak_error")) < 0.039
    # of the second seed that was compiled, forecast before any ran, and their memory mended since
    last = compiled[-15:]
    assert median(errors(last, "device_error")) < 0.0219, "3.4% while attention at a high clock was forecast too slow"
    assert median(errors(last, "peak_error")) < 0.0007
    assert max(errors(last, "peak_error")) < 0.0179
    checkpointed = errors([row for row in compiled if row["checkpoint"] == "full"], "attention_error")
    assert max(checkpointed) < 0.1151, "at 1,575 MHz; 0.1 when attention with a mask was told from steps at such clocks"
    assert median(checkpointed) < 0.0482
    # the third: one decode over many tokens, and code of another version of torch
    apart = [row for row in fifth if row["context"] == "13760" or row["name"].startswith("mobilenet")]
    assert len(apart) == 3
    assert max(errors(apart, "device_error")) < 0.2013
    rest = [row for row in fifth if row not in apart]
    assert max(errors(rest, "device_error")) < 0.073
    assert median(errors(fifth, "device_error")) < 0.0235
    assert median(errors([row for row in fifth if row["bound"] != "host"], "step_error")) < 0.0305
    assert max(errors(fifth, "peak_error")) < 0.023
    (prefill,) = (row for row in fifth if row["phase"] == "prefill")
    assert max(errors([prefill], "attention_error")) < 0.055, "a mask over a static cache"
    # the fourth: after attention with masks was timed alone, by which these and those before are told
    assert median(errors(sixth, "device_error")) < 0.0145
    assert max(errors(sixth, "device_error")) < 0.0526
    bound_by_device = [row for row in sixth if row["bound"] != "host"]
    assert median(errors(bound_by_device, "step_error")) < 0.0044
    assert max(errors(bound_by_device, "step_error")) < 0.0556
    assert median(errors(sixth, "peak_error")) < 0.001
    assert max(errors(sixth, "peak_error")) < 0.0582
    assert all(row["within_interval"] == "true" for row in sixth)
    # the fifth and sixth: profiled after a rest; of the sixth's last 14 the host's pace was taken between the rounds
    assert median(errors(rested, "device_error")) < 0.013
    long_prefill = [row for row in rested if row["context"] == "14848"]
    assert len(long_prefill) == 2
    assert max(errors(long_prefill, "device_error")) < 0.0372, "11.3% where the clock was not seen to fall"
    assert max(errors([row for row in rested if row not in long_prefill], "device_error")) < 0.063
    bound_by_device = [row for row in rested if row["bound"] != "host"]
    assert len(bound_by_device) == 22
    assert median(errors(bound_by_device, "step_error_profile_host")) < 0.0136
    assert max(errors(bound_by_device, "step_error_profile_host")) < 0.06
    paced = [row for row in rested[22:] if row["bound"] == "host"]
    assert len(paced) == 4
    assert median(errors(paced, "step_error")) < 0.0555, "3.8% while launches alone counted: one trains adapters"
    assert max(errors(paced, "step_error")) < 0.256, "checkpointed, in fp16"
    assert median(errors(rested, "peak_error")) < 0.0016
    assert max(errors(rested, "peak_error")) < 0.058
    assert sum(row["within_interval"] == "true" for row in rested) >= 35
    assert sum(row["device_within"] == "true" for row in rested) >= 35, "which set the widths, with those below"
    assert sum(row["device_within"] == "true" for row in sixth) >= 10
    prefills = [row for row in rows if (row["phase"], row["mode"]) == ("prefill", "compile") and row["bound"] != "host"]
    assert len(prefills) == 10
    assert median(errors(prefills, "step_error")) < 0.0417
    assert max(errors(prefills, "step_error")) < 0.1038, "the README says 11%"
    # the seventh and eighth: two of one host, all paced
    assert median(errors(last_drawn, "device_error")) < 0.02, "1.4% by the code of a later torch"
    assert max(errors(last_drawn, "device_error")) < 0.0754
    bound_by_device = [row for row in last_drawn if row["bound"] != "host"]
    assert len(bound_by_device) == 11
    assert median(errors(bound_by_device, "step_error_profile_host")) < 0.0335, "2.8% by the code of a later torch"
    (on_nan,) = (row for row in bound_by_device if row["name"] == "llama-3.2-1b-d11")  # 0.3% with numbers
    assert float(on_nan["step_error"]) < 0.11
    numbers = [row for row in bound_by_device if row is not on_nan]
    assert max(errors(numbers, "step_error_profile_host")) < 0.077, "a prefill's norms, by another torch"
    paced += [row for row in last_drawn if row["bound"] == "host"]
    assert len(paced) == 13
    assert median(errors(paced, "step_error")) < 0.056
    assert max(errors(paced, "step_error")) < 0.256, "a call of GPT-2 in 6 ms"
    assert median(errors(last_drawn, "peak_error")) < 0.0011
    assert max(errors(last_drawn, "peak_error")) < 0.058
    assert sum(row["within_interval"] == "true" for row in last_drawn) >= 18
    assert sum(row["device_within"] == "true" for row in last_drawn) >= 16
    # the ninth and tenth: after the law of kernels' own clocks; forecast before they ran, but for one that was refused.
    # The rest of the tenth, and of the eleventh what the host was likely to bound: after a graph's tensors and
    # gradients counted; forecast before any was seen. A ConvNeXt of 96 images is 8% short in one
    assert sum(not row["step_error"] for row in first[-100:-74]) == 1
    for found, middle, most, count, middle_step, most_step in (
        (newest, 0.016, 0.07, 16, 0.0125, 0.0625), (latest, 0.0225, 0.086, 13, 0.0225, 0.08),
    ):  # fmt: skip
        assert median(errors(found, "device_error")) < middle
        assert max(errors(found, "device_error")) < most
        bound_by_device = [row for row in found if row["bound"] != "host"]
        assert len(bound_by_device) == count
        assert median(errors(bound_by_device, "step_error_profile_host")) < middle_step
        assert max(errors(bound_by_device, "step_error_profile_host")) < most_step
    paced = [row for row in newest if row["bound"] == "host"]
    assert median(errors(paced, "step_error")) < 0.1127, "9% before; of the worst, 30% before, adapters are 18% short"
    assert max(errors([row for row in paced if not row["name"].startswith("convnext")], "step_error")) < 0.1904
    assert max(errors(newest, "peak_error")) < 0.0272
    assert sum(row["within_interval"] == "true" for row in newest) >= 24
    images = [row for row in latest if "@" in row["name"]]
    assert len(images) == 4
    assert max(errors(images, "step_error")) < 0.2091, "up to 40% while launches alone counted"
    assert max(errors(latest, "peak_error")) < 0.054
    assert sum(row["within_interval"] == "true" for row in latest) >= 17
    assert sum(row["device_within"] == "true" for row in latest) >= 15
    drawn_images = [row for row in rows if row["mode"] == "compile" and "@" in row["name"] and row["bound"] == "host"]
    assert median(errors(drawn_images, "step_error")) < 0.108, "24% while launches alone counted"
    all_rested += latest
    assert median(errors(all_rested, "device_error")) < 0.0155
    assert max(errors(all_rested, "device_error")) < 0.0855, "12% while programs' begins did not count: a decode"
    assert all((row["used_in_intervals"] == "true") == (row in all_rested) for row in rows)
    # the twelfth, forecast before it ran: by the widths that those before set
    assert median(errors(blind, "device_error")) < 0.021
    assert max(errors(blind, "device_error")) < 0.063
    bound_by_device = [row for row in blind if row["bound"] != "host"]
    assert len(bound_by_device) == 15
    assert median(errors(bound_by_device, "step_error_profile_host")) < 0.017
    assert max(errors(bound_by_device, "step_error_profile_host")) < 0.0395
    by_host = [row for row in blind if row["bound"] == "host"]
    assert max(errors(by_host, "step_error")) < 0.3621, "29% as forecast: a decode, whose process's launches cost more"
    assert max(errors(blind, "peak_error")) < 0.013
    assert sum(row["within_interval"] == "true" for row in blind) == 16
    assert 0.85 <= sum(row["device_within"] == "true" for row in blind) / len(blind) <= 0.97
    # four left of the twelfth and fifteen of the thirteenth: after programs' begins, and what entering graphs costs
    decode = next(row for row in thirteenth if row["name"] == "qwen3-4b")  # a cache repeated in 11 us, not 6
    assert median(errors(thirteenth, "device_error")) < 0.0195
    assert max(errors(thirteenth, "device_error")) < 0.121
    assert max(errors([row for row in thirteenth if row is not decode], "device_error")) < 0.053
    by_bound = [[row for row in thirteenth if (row["bound"] == "host") is is_host] for is_host in (True, False)]
    assert [len(found) for found in by_bound] == [10, 9]
    assert median(errors(by_bound[0], "step_error")) < 0.0905
    assert max(errors(by_bound[0], "step_error")) < 0.192
    assert median(errors(by_bound[1], "step_error_profile_host")) < 0.0145
    assert max(errors(by_bound[1], "step_error_profile_host")) < 0.0405
    assert max(errors(thirteenth, "peak_error")) < 0.0525
    assert all(row["within_interval"] == "true" for row in thirteenth)
    assert [row for row in thirteenth if row["device_within"] != "true"] == [decode]
    # that decode again, on a core that others left; two more of the twelfth and nine of a fourteenth
    again, *fourteenth = last_of_all
    assert (again["name"], again["phase"]) == ("qwen3-4b", "decode")
    assert max(errors([again], "device_error")) < 0.093
    assert median(errors(fourteenth, "device_error")) < 0.0205
    assert max(errors(fourteenth, "device_error")) < 0.0615
    by_bound = [[row for row in fourteenth if (row["bound"] == "host") is is_host] for is_host in (True, False)]
    assert [len(found) for found in by_bound] == [4, 7]
    assert median(errors(by_bound[0], "step_error")) < 0.118
    assert max(errors(by_bound[0], "step_error")) < 0.2495, "Muon, checkpointed"
    assert median(errors(by_bound[1], "step_error_profile_host")) < 0.0245
    assert max(errors(by_bound[1], "step_error_profile_host")) < 0.0645
    assert max(errors(fourteenth, "peak_error")) < 0.0105
    assert all(row["within_interval"] == "true" for row in last_of_all)
    assert sum(row["device_within"] == "true" for row in fourteenth) == 9
    trained = [row for row in rows if row["mode"] == "compile" and row["phase"] == "train" and row["attention_error"]]
    assert len(trained) >= 50
    assert median(errors(trained, "attention_error")) < 0.0202, "6.6% by a law over calls without masks"
    host_of_run = [row for row in compiled if row["name"] in ("qwen3-1.7b", "qwen3-4b", "llama-3.2-1b")][-4:]
    by_run = errors([row for row in host_of_run if row["bound"] == "host"], "step_error")
    assert median(by_run) < 0.1775, "none at first; 5.8% while entering a graph was told by the run alone: decodes"
    experts = [row for row in rows if "moe" in row["name"]]
    assert max(errors(experts, "step_error")) < 0.2162, "a loop that waits"
    last = [row for row in first if row["mode"] == "eager"][-48:]  # of these no mending has seen any
    assert median(errors(last, "device_error")) < 0.0115
    assert all(row["device_within"] == "true" for row in last)


def test_attention_in_fp32_and_of_narrow_values_is_as_far_off_as_the_guide_says() -> None:
    rows = rows_of("attention-steps")
    assert {row["precision"] for row in rows} == {"tf32", "fp32", "autocast-bf16"}
    assert median(errors(rows, "device_error")) < 0.0085
    assert max(errors(rows, "device_error")) < 0.041
    narrow = [row for row in rows if row["name"].startswith("mla")]
    assert max(errors(narrow, "attention_error")) < 0.02, "the same attention of 192 columns of both: a quarter longer"
    assert max(errors(rows, "step_error")) < 0.041
    assert max(errors(rows, "peak_error")) < 0.0053  # after tiny models, whose blocks it finds: alone steps need less
    assert all(row["within_interval"] == "true" for row in rows)


def test_nineteen_architectures_are_as_far_off_as_the_guide_says() -> None:
    first, rows = (rows_of("architectures", "nvidia-h100-sxm", name) for name in ("first.csv", "validation.csv"))
    assert len(first) == len(rows) == 19
    assert median(errors(first, "device_error")) < 0.0135
    assert sum(error < 0.05 for error in errors(first, "device_error")) == 18
    assert sum(error < 0.0015 for error in errors(first, "peak_error")) == 18
    assert sum(error < 0.05 for error in errors(rows, "device_error")) == 18
    assert max(errors(rows, "device_error")) < 0.062, "Falcon's attention by parts"
    assert median(errors(rows, "step_error")) < 0.043
    assert max(errors([row for row in rows if row["name"] != "qwen3-next-d4"], "step_error")) < 0.075
    assert sum(error < 0.0015 for error in errors(rows, "peak_error")) >= 18
    assert max(errors(rows, "peak_error")) < 0.042, "the same"


def test_fine_tuning_is_as_far_off_as_the_guide_says() -> None:
    rows = rows_of("fine-tune")
    assert max(errors(rows, "device_error")) < 0.025
    assert max(errors(rows, "peak_error")) < 0.005
    known_wrong = [row for row in rows if row["finetune"] == "lora" and row["checkpoint"] == "full"]
    assert all(float(row["step_error"]) < 0 for row in known_wrong), "the host of adapters that are recomputed"
    assert max(errors(known_wrong, "step_error")) < 0.16
    assert median(errors([row for row in rows if row not in known_wrong], "step_error")) < 0.03


def test_steps_of_our_adamw_are_as_far_off_as_the_guide_says() -> None:
    """The first two runs and the third, of code whose step costs the host less, each by its own bounds."""
    rows = rows_of("adamw-triton")
    assert len(rows) == 30
    assert median(errors(rows, "device_error")) < 0.0045
    assert max(errors(rows, "device_error")) < 0.033
    assert max(errors(rows, "peak_error")) < 0.0031
    for run, of_device, of_host in (
        (rows[:20], (0.0175, 0.04), (0.052, 0.12)),
        (rows[20:], (0.025, 0.048), (0.11, 0.135)),
    ):
        for by_host, (middle, most) in ((False, of_device), (True, of_host)):
            found = errors([row for row in run if (row["bound"] == "host") == by_host], "step_error")
            assert median(found) < middle
            assert max(found) < most


def test_memory_of_bitsandbytes_steps_is_what_the_guide_says() -> None:
    rows = rows_of("bitsandbytes")
    qlora = [float(row["peak_error"]) for row in rows if row["finetune"] == "qlora" and row["checkpoint"] == "none"]
    assert (len(rows), len(qlora)) == (19, 11)
    assert max(map(abs, qlora)) < 0.0055
    assert median(map(abs, qlora)) < 0.0004
    assert max(errors([row for row in rows if row["finetune"] != "qlora"], "peak_error")) < 0.002


@pytest.mark.parametrize(
    ("suite", "name", "chosen"),
    [
        ("inference", "qwen3-4b", {"phase": "decode", "context": 4096, "mode": "eager"}),
        ("random", "qwen3-4b-d15", {"mode": "compile"}),
        ("fine-tune", "qwen3-0.6b", {"optimizer": "muon"}),
        ("adamw-triton", "w512-d4", {}),
    ],
)
def test_the_tables_are_what_today_s_code_says(suite: str, name: str, chosen: dict[str, object]) -> None:
    def is_wanted(plan: StepPlan) -> bool:
        return plan.name == name and all(getattr(plan, field) == value for field, value in chosen.items())

    ((*found,),) = compare_folders(
        [StepsFolder(REPORTS["nvidia-h200"] / suite, find_profile("nvidia-h200"), is_wanted=is_wanted)],
        find_stream=stream_of_its_torch if suite == "random" else None,
    )
    kept = [row for row in rows_of(suite) if row["name"] == name and all(row[f] == str(v) for f, v in chosen.items())]
    assert [row.step.forecast for row in found] == pytest.approx(
        [float(row["step_forecast"]) for row in kept], rel=5e-3
    )
    assert any(is_seen(row) for row in found) == ("optimizer" in chosen)


def test_what_an_optimizer_s_calls_cost_is_still_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    from studies.calls import optimizers

    assert Path(ROWS, "measurements.jsonl.gz").is_file()
    optimizers.report()
    ratios = [float(line.split("|")[4]) for line in capsys.readouterr().out.splitlines() if "| qwen3-" in line]
    assert len(ratios) >= 2
    assert 0.85 < median(ratios) < 1.05
