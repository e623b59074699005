"""A trial of new kernels: what it counts, and that a wrong or refused way is a row without a time."""

from __future__ import annotations

import pytest
import torch

from flopcast.kernels import documents
from flopcast.kernels.attention_config import from_key
from flopcast.kernels.shapes import Attention
from studies.kernels import trial


@pytest.mark.parametrize(("window", "mean"), [(5, 0), (0, 8), (3, 8), (0, 0)])
def test_pairs_are_those_of_the_mask(window: int, mean: int) -> None:
    shape = Attention(batch=1, heads=2, kv_heads=1, seq=50, head_dim=64, window=window)
    spans = None
    if mean:
        lengths = trial.lengths_of(50, mean)
        assert sum(lengths) == 50
        assert min(lengths) >= 1
        spans = documents.from_ids(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None])
    mask = trial.additive(shape, spans, "cpu")
    assert trial.pairs_seen(shape, spans) == int((mask == 0).sum())


def test_a_wrong_way_and_a_refused_one_are_rows_without_a_time() -> None:
    def refuse() -> trial.Way:
        raise NotImplementedError("no such kernel")

    def check(way: str, out: float) -> tuple[float, float]:
        return abs(out - 1.0), 0.1

    ways = {"right": lambda: lambda: 1.05, "wrong": lambda: lambda: 2.0, "refused": refuse}
    case = trial.Case("fp8", "case", 1e12, ways, check, "right")
    sound, rows = trial.sound(case)
    assert list(sound) == ["right"]
    rows = trial.finished(case, rows, {"right": [2e-3, 1e-3, 3e-3]}, {"right": [4e-3, 9e-3, 5e-3]})
    assert [row["status"] for row in rows] == ["ok", "incorrect", "NotImplementedError: no such kernel"]
    assert (rows[0]["seconds"], rows[0]["wall"]) == (2e-3, 5e-3)
    assert rows[0]["tflops"] == pytest.approx(500.0)
    assert all("seconds" not in row for row in rows[1:])
    assert "2000.0 us" in trial.said(rows[0])


def test_the_summary_is_of_cases_with_a_peer_and_of_1000_tokens_or_more() -> None:
    of = {"kind": "backward", "way": "triton"}
    ratios = {"b64h16k8s256d128": 9.0, "b16h16k8s1000d128": 0.5, "b1h16k8s16384d128": 2.0}
    rows = [{**of, "case": f"attention/bwd/causal/bf16/{name}", "ratio": ratio} for name, ratio in ratios.items()]
    (line,) = trial.summary([*rows, {**of, "case": "attention/bwd/causal/bf16/b1h1k1s2048d128"}])
    assert line.split()[1:] == ["triton", "1.000", "of", "the", "peer,", "least", "0.500,", "2", "cases"]


@pytest.mark.parametrize("key", ["hopper/64x128/w4s3/skip", "hopper/128x128/w4s2/single/l2-16/delta"])
def test_the_variants_have_keys(key: str) -> None:
    assert from_key(key).key == key


def test_steps_agree_only_if_they_clip_alike() -> None:
    """Adam's first step is as long whatever scales its gradients: what tells are the first moments."""
    sizes = [torch.Size((40, 30)), torch.Size((7,))]
    steps = [trial.stepped(sizes, "torch", norm, "cpu")() for norm in (1.0, 1.0, 0.0, 2.0)]
    check = trial.against_torch()
    found = [check("torch", optimizer) for optimizer in steps]
    assert found[0] is None
    errors = [error for error, tolerance in filter(None, found) if tolerance == trial.AGREEMENT]
    assert errors[0] == 0.0
    assert min(errors[1:]) > 0.5
    steps[1].param_groups[0]["params"][1].data.add_(1e-6)  # a thousandth of a step
    assert trial.disagreement(steps[1], steps[0]) == pytest.approx(1e-3, rel=0.02)


def test_the_models_of_a_step_have_all_their_parameters() -> None:
    sizes = trial.sizes_of("qwen3-0.6b")
    assert len(sizes) == 310
    assert sum(size.numel() for size in sizes) == 596_049_920
    names = [(case.kind, case.name, *case.ways) for case in trial.steps_of_adamw("cpu", ("gpt2",))]
    assert names == [(kind, "gpt2", "torch", "triton") for kind in ("adamw, clipping", "adamw")]
