"""Who leads by mode: the table names one leader per size, and says where it is not separable."""

from __future__ import annotations

from flopcast.roofline.dollars.curves import cost_curves
from flopcast.roofline.gpu.library.profiles import find_profiles
from flopcast.roofline.stream.model.models import ladder
from flopcast.roofline.stream.model.run import Run
from studies.claims.modes import page, rows_of, tables_of
from studies.claims.report import price_sets


def test_each_size_has_one_leader() -> None:
    gpus = ("nvidia-h100-sxm", "nvidia-h200")
    sets = price_sets()[:1]
    curves = cost_curves(find_profiles(gpus), ladder((512, 1024)), Run(), dict(sets[0].prices))
    title, _, text = tables_of("eager", curves, sets)
    assert title.startswith("## eager")
    rows = text.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["512", "1024"]
    assert all(row.count("**") == 2 for row in rows)
    assert all(" *" in row for row in rows)  # hosts of their own decide nothing between these two


def test_the_page_has_every_mode_size_and_claim() -> None:
    gpus = ("nvidia-l4", "nvidia-a100-80gb-pcie", "nvidia-h100-sxm", "nvidia-h200")
    sets = price_sets()[:2]
    curves = cost_curves(find_profiles(gpus), ladder((256, 512, 1024, 2048)), Run(), dict(sets[0].prices))
    by_mode = {"eager": curves, "compile": curves}
    text = page("python -m studies.claims.modes", (256, 512, 1024, 2048), by_mode, sets)
    assert text.count("| eager |") == text.count("| compile |") == len(sets) + 3  # leaders by prices, and three claims
    assert "![FLOPs per dollar by mode](modes.png)" in text
    rows = rows_of(by_mode, sets)
    assert len(rows) == 2 * 2 * 4
    assert {row["mode"] for row in rows} == {"eager", "compile"}
    assert all(row["separable"] is (row["contenders"] == "") for row in rows)
