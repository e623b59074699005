"""Graphs that two H200s compiled of a sharded step launch what is compiled for it here, whatever torch is installed."""

from __future__ import annotations

from studies.imports import ROOT
from studies.parallel.compiled import amounts, both


def test_a_rank_launches_what_two_gpus_did() -> None:
    """Of the seven recorded steps the quickest; `python -m studies.parallel.compiled compare` has them all."""
    _, recorded, made = both(ROOT / "reports" / "parallel" / "graphs" / "fsdp.rank0.json.gz")
    assert [len(graph.launches) for graph in made] == [len(graph.launches) for graph in recorded]
    (launches, moved), (compiled, compiled_moved) = amounts(recorded), amounts(made)
    assert compiled == launches > 200
    assert abs(compiled_moved / moved - 1) < 0.001
