"""Drawn compiled steps, forecast from the code of the torch that ran them."""

from __future__ import annotations

from statistics import median

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.validation.compare_steps import StepsFolder, compare_folders
from studies.compiled.another_torch import PAGE, SOURCE, STEPS, kept_stream, path_of, plans


def test_code_of_the_torch_that_ran_the_steps_is_nearer() -> None:
    kept = [plan for plan in plans() if path_of(plan).is_file()]
    assert len(kept) == len(list(plans())) == 232
    steps = StepsFolder(
        STEPS / "run8", find_profile(SOURCE), is_wanted=lambda plan: plan.mode == "compile" and plan.phase == "train"
        and plan.optimizer != "muon" and path_of(plan).is_file()
    )  # fmt: skip
    (rows,) = compare_folders([steps], find_stream=kept_stream)
    errors = {row.label: row.device.error for row in rows if row.device.error is not None}
    assert len(errors) == len(rows) >= 12
    assert median(map(abs, errors.values())) < 0.03
    of_mobilenet = [error for label, error in errors.items() if label.startswith("mobilenet")]
    assert len(of_mobilenet) == 2
    assert max(map(abs, of_mobilenet)) < 0.075, "15 and 22% by the code of torch 2.13"
    text = PAGE.read_text(encoding="utf-8")
    assert all(label in text for label in errors)
