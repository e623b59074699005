"""The section on steps that ran on the Triton kernels: from the committed measurements, and from other files."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopcast.errors import DataError
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.views.page.extra import extra_sections
from flopcast.roofline.views.page.on_kernels import STEPS, on_kernels_section, pairs_of, read

H200 = Path("reports/nvidia-h200")


def test_every_step_that_ran_on_both_is_shown_with_all_of_its_time() -> None:
    pairs = pairs_of(read(H200 / STEPS))
    assert len(pairs) == 15
    for pair in pairs:
        for ran in (pair.torch, pair.ours):
            assert sum(ran.parts.values()) == pytest.approx(max(ran.seconds, ran.kernel_seconds))
    part = on_kernels_section("nvidia-h200", H200)
    assert part is not None
    (figure,), (table,) = part.figures, part.tables
    assert "Where each millisecond went" in figure.title
    assert len(table.rows) == 15
    by_mode = part.advice[1]
    assert all(word in by_mode for word in ("eager 0.42 to 0.70", "torch.compile 0.80 to 0.91", "graphs 0.84 to 0.98"))


def test_a_gpu_without_such_steps_has_no_section(tmp_path: Path) -> None:
    assert on_kernels_section("nvidia-h100-sxm", tmp_path) is None


def test_another_file_is_told_on_the_page(tmp_path: Path, h200: Profile) -> None:
    path = tmp_path / STEPS
    path.parent.mkdir()
    path.write_text("config,by_class\nqwen3-0.6b,{}\n")
    with pytest.raises(DataError, match=r"steps.csv is not what .*studies.kernels.steps"):
        read(path)
    _, faults = extra_sections(h200, tmp_path, may_trace=False)
    assert any("steps on our kernels could not be made" in fault for fault in faults)
