"""Host time per call: contenders take turns, the median counts, and waiting for the device does not."""

from __future__ import annotations

import pytest
import torch

from studies.kernels import launch_cost


def test_the_median_of_turns_counts_and_no_wait_does() -> None:
    now, made = [0.0], []

    def contender(name: str, seconds: float, first: float) -> None:
        now[0] += first if name not in made else seconds
        made.append(name)

    def wait() -> None:
        now[0] += 100.0

    both = [lambda: contender("a", 2.0, 50.0), lambda: contender("b", 3.0, 0.0)]
    assert launch_cost.medians(both, 5, 2, wait, clock=lambda: now[0]) == pytest.approx([2.0, 3.0])
    assert made[:4] == ["a", "a", "b", "b"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="times launches there")
def test_without_a_gpu_it_says_so(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_cost.main([str(tmp_path)]) == 1
    assert "on a GPU: none is here" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_operation_has_both_directions() -> None:
    rows = list(launch_cost.run("cuda", torch.bfloat16, 3, 2))
    assert {row.direction for row in rows} == {"forward", "backward", "step"}
    assert all(row.ours_us > 0 and row.torch_us > 0 for row in rows)
