"""Kernels that read and write memory in different shares: what is measured, and what the committed ones say."""

from __future__ import annotations

import json
from statistics import median

import pytest
import torch
from torch import Tensor

from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.laws.generated import programs, seconds
from flopcast.roofline.gpu.library.generated import FILE, fitted, rates_of
from studies.compiled import generated
from studies.compiled.traffic import CONFIGURATIONS, SIZES, functions

FOLDER = FILE.parents[2] / "reports" / "nvidia-h200" / generated.TRAFFIC


def test_each_function_moves_the_bytes_it_is_asked_for() -> None:
    total, shares = 20e6, []
    for function, operands in functions(torch.device("cpu"), total):
        found = function(*operands)
        results: tuple[Tensor, ...] = found if isinstance(found, tuple) else (found,)
        read = 0 if function.__name__ == "filled" else sum(one.nbytes for one in operands)
        written = sum(one.nbytes for one in results)
        assert read + written == pytest.approx(total, rel=0.03)
        shares.append(written / (read + written))
    assert min(shares) < 0.01
    assert max(shares) == 1.0
    assert sum(share > 0.6 for share in shares) >= 6, "no step that the law is fitted to tells what more writes take"


def test_what_begins_many_programs_takes_as_long_for_each() -> None:
    """Rows of 1,024 summed, zeros in bf16 and a cache repeated eight times: whatever they move."""
    rows = generated.rows_of(FOLDER, generated.TRAFFIC)
    assert len(rows) == 15 * len(SIZES)
    largest = rows[-15:]
    bound = [largest[place] for place in (10, 11, 14)]
    each = [row.measured / programs(row.kernel) for row in bound]
    assert each == pytest.approx([0.605e-9] * 3, rel=0.01)
    assert all(row.measured / programs(row.kernel) > 0.61e-9 for row in largest if row not in bound)


def test_the_law_tells_those_of_middle_size_to_which_nothing_was_fitted() -> None:
    rates, law = rates_of(find_spec(generated.GPU)), fitted().law
    held = [row for row in generated.alone(FOLDER) if not generated.is_fitted(row)]
    errors = [abs(seconds(row.kernel, rates, law) / row.measured - 1) for row in held]
    assert len(errors) == 15
    assert median(errors) < 0.025
    assert max(errors) < 0.125


def test_inductor_leaves_the_configuration_of_short_kernels_to_chance() -> None:
    rows = json.loads(CONFIGURATIONS.read_text())
    short = [timed for row in rows if row["us"][1] < 8 for timed in row["timed_us"]]
    long = [timed for row in rows if row["us"][1] > 30 for timed in row["timed_us"]]
    assert 0.4 < sum(second < first for first, second in short) / len(short) < 0.75
    assert sum(second < first for first, second in long) / len(long) < 0.1


def test_programs_of_half_the_size_take_twice_as_long_where_programs_begin_too_slowly() -> None:
    """Zeros in bf16, and a cache that is repeated."""
    rows = [row for row in json.loads(CONFIGURATIONS.read_text()) if row["us"][0] > 10]
    bound = [row["us"][1] / row["us"][0] for row in rows if "zeros" in row["kernel"] or "expand" in row["kernel"]]
    assert len(bound) == 8
    assert all(1.8 < ratio < 2.2 for ratio in bound)
    assert all(row["us"][1] / row["us"][0] > 1 for row in rows)
