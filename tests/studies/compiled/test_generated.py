"""The fit of the law of generated kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.laws.generated import seconds
from flopcast.roofline.gpu.library.generated import FILE, fitted, rates_of
from flopcast.roofline.stream.compiled.generated_kernel import GeneratedKernel
from flopcast.roofline.stream.compiled.launches import Kind, Work
from studies.compiled import generated

RATES = rates_of(find_spec(generated.GPU))
REPORTS = FILE.parents[2] / "reports" / "nvidia-h200"


def row(size: int, arithmetic: float, factor: float = 1.0) -> generated.Row:
    work = Work(arithmetic=arithmetic, requested=float(size), steps=1)
    kernel = GeneratedKernel(
        kind=Kind.POINTWISE, bytes_read=size // 2, bytes_written=size // 2, numels=(("x", size),), work=work
    )
    measured = factor * seconds(kernel, RATES, fitted().law)
    return generated.Row("case", f"triton_poi_{size}_{arithmetic}", kernel, measured)


def test_a_law_is_found_again_in_the_times_that_it_gives_though_one_is_wrong() -> None:
    rows = [row(2**power, arithmetic) for power in range(10, 30) for arithmetic in (0.0, 2.0**power, 60 * 2.0**power)]
    found = generated.fitted_law([*rows, row(2**20 + 8, 0.0, factor=20.0)], RATES)
    for one in rows:
        assert seconds(one.kernel, RATES, found) == pytest.approx(one.measured, rel=0.03)


def test_the_table_says_what_was_fitted_and_what_was_held_out() -> None:
    known, held = row(2**20, 0.0), replace(row(2**22, 0.0, factor=1 / 1.1), case="another")
    shown = generated.report([replace(known, case=generated.FIT[0]), held], fitted(), RATES)
    assert "1 kernels fitted, of 6 steps and of some timed by themselves; 1 held out" in shown
    assert "| another | 1 | 0.00 | +10.0% | 10.0% | 10.0% |" in shown


def test_what_ships_is_what_the_recorded_steps_give() -> None:
    rows = [one for case in generated.FIT for one in generated.rows_of(REPORTS / "compiled-steps", case)]
    rows += [one for one in generated.alone(REPORTS / generated.TRAFFIC) if generated.is_fitted(one)]
    found = generated.fitted_law(rows, RATES)
    for one in rows:
        assert seconds(one.kernel, RATES, found) == pytest.approx(seconds(one.kernel, RATES, fitted().law), rel=0.01)
