"""The energy of a byte that ships is what the committed steps' power gives."""

from __future__ import annotations

from statistics import median

import pytest

from flopcast.roofline.gpu.catalogue.power import BYTE_JOULES_OF
from flopcast.roofline.gpu.library.profiles import find_profile
from studies.byte_energy import joules_of
from studies.imports import ROOT


@pytest.mark.parametrize("gpu", BYTE_JOULES_OF)
def test_the_energy_of_a_byte_is_what_steps_drew(gpu: str) -> None:
    found = [joules for _, joules in joules_of(ROOT / "reports" / gpu / "steps", find_profile(gpu))]
    assert len(found) >= 15
    assert median(found) == pytest.approx(BYTE_JOULES_OF[gpu], rel=0.01)
