"""Who leads by mode: the table names one leader per size, and says where it is not separable."""

from __future__ import annotations

from flopcast.roofline.dollars.curves import cost_curves
from flopcast.roofline.gpu.library.profiles import find_profiles
from flopcast.roofline.stream.model.models import ladder
from flopcast.roofline.stream.model.run import Run
from studies.claims.modes import page_of
from studies.claims.report import price_sets


def test_each_size_has_one_leader() -> None:
    gpus = ("nvidia-h100-sxm", "nvidia-h200")
    sets = price_sets()[:1]
    curves = cost_curves(find_profiles(gpus), ladder((512, 1024)), Run(), dict(sets[0].prices))
    title, text = page_of("eager", curves, sets)
    assert title.startswith("## eager")
    rows = text.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["512", "1024"]
    assert all(row.count("**") == 2 for row in rows)
    assert all(" *" in row for row in rows)  # hosts of their own decide nothing between these two
