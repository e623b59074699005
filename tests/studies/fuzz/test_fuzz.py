"""Every command with damaged files and damaged options: done with numbers that can be, or refused in words.

FLOPCAST_FUZZ=200 tries so many of each format in place of a few; `python -m studies.fuzz` counts how they end.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.fuzz.examples import NAMES, WORDS, Examples

# A trace takes a second, a fit with its comparison another.
FEW = {"config": 2, "machine": 2, "measurements": 2, "steps": 2, "profile": 3, "sweep": 2, "host": 3, WORDS: 3}
TRIED = {name: int(os.environ.get("FLOPCAST_FUZZ", FEW.get(name, 5))) for name in NAMES}


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    return Examples(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", NAMES)
def test_no_damage_ends_in_a_traceback_or_in_silence(examples: Examples, name: str) -> None:
    @settings(max_examples=TRIED[name])
    @given(st.integers(0, 2**32))
    def try_one(seed: int) -> None:
        found = examples.one(Random(seed), name)
        assert not found.outcome.is_defect, f"{found.outcome.why}: flopcast {found.command}"

    try_one()
