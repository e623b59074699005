"""What processes on one host cost each other, as four on a host of four H200s did."""

from __future__ import annotations

import pytest

from flopcast.roofline.step import communication
from studies.parallel.beside import FILES, TIMED, by_session, report, sets_of, slopes
from studies.parallel.phases import DEPTHS, FOLDER, rows_in

LOW, HIGH = DEPTHS


def test_every_process_ran_alone_and_beside_all_others() -> None:
    (file,) = FOLDER.glob(FILES)
    found = slopes(rows_in(file))
    assert {key for key in found if key[0] == 0} == {
        (0, len(ranks), pinned) for ranks, pinned in sets_of(4) if 0 in ranks
    }
    assert all(phases.keys() == set(TIMED) for phases in found.values())


def test_processes_at_once_are_as_fast_as_the_law_of_the_slowest_one_says() -> None:
    (file,) = FOLDER.glob(FILES)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in report(rows_in(file)).splitlines()]
    at_once = {row[1]: row[3:] for row in rows if row[0] == "4"}
    assert at_once == {"forward": ["0.99", "1.12"], "backward": ["1.02", "1.09"]}
    told = " ".join((communication.slowest_host_factor.__doc__ or "").split())
    for numbers in zip(at_once["forward"], at_once["backward"], strict=True):
        assert " and ".join(numbers) in told
    assert all(float(slowest) <= communication.slowest_host_factor(4) for _, slowest in at_once.values())


def test_a_call_is_the_slope_between_two_depths() -> None:
    """Beside another, rank 0 takes twice as long for each layer, and as long as before for the rest."""

    def row(ranks: list[int], depth: int, each: float) -> dict[str, object]:
        phases = [dict.fromkeys(TIMED, 1.0 + each * depth)] * 3
        return {"rank": 0, "ranks": ranks, "pinned": False, "depth": depth, "phases": phases}

    rows = [row(ranks, depth, each) for ranks, each in (([0], 0.1), ([0, 1], 0.2)) for depth in DEPTHS]
    found = slopes(rows)
    assert found[0, 1, False]["forward"] == pytest.approx(0.1)
    assert found[0, 2, False]["backward"] == pytest.approx(0.2)
    assert "| 2 | forward | 200.00 | 2.00 | 2.00 |" in report(rows)


def test_steps_take_longer_than_their_ranks_hosts_on_average_as_the_law_says() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in by_session().splitlines()[2:]]
    over = {row[0]: float(row[3]) for row in rows}
    assert len(over) == 13
    assert over.pop("divided") < 1, "ring attention and experts: the host waits within a step"
    assert (min(over.values()), max(over.values())) == (1.04, 1.17)
