"""The spreads of compiled steps: from which steps they come. `test_validation` says that they ship."""

from __future__ import annotations

import pytest

from flopcast.roofline.step.uncertainty import Moves
from flopcast.roofline.validation.step_plans import INTERVALS
from studies.compiled.intervals import comparison
from studies.compiled.record import CASES
from studies.compiled.steps import Compared


def test_what_was_fitted_to_a_step_sets_no_width() -> None:
    case = next(case for case in CASES if case.name == "gpt2-l2")  # generated kernels and dropout were fitted to it
    seconds = {"gemm": 2.0, "attention": 1.0, "generated": 1.0}
    step = Compared(case.name, {**seconds, "gemm": 2.2}, seconds, {"gemm": 0.01}, Moves(0.1, 0.1), 1, None)
    row = comparison(case, step)
    assert row.plan.group == INTERVALS
    assert row.classes["gemm"].error == pytest.approx(0.1)
    assert row.classes["attention"].error is row.classes["generated"].error is row.device.error is None
    assert row.device.measured == 4.0  # of which shares are taken
