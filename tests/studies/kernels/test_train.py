"""Training on our kernels beside torch's: what counts as learning the same, and that there is something to learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from studies.kernels import train

TORCH = train.Row("torch bf16", 200, 9.0, 3.0, 0.001, 0.01, "")


def test_ours_agrees_within_the_noise_that_bf16_makes() -> None:
    assert train.agrees(replace(TORCH, deviation=0.0012, gradient_error=0.012, last_loss=3.01), TORCH) == ""
    said = train.agrees(replace(TORCH, deviation=0.002, gradient_error=float("nan"), last_loss=3.1), TORCH)
    assert "losses deviate by 2.00e-03" in said
    assert "gradients are nan off" in said
    assert "it ends at 3.1000" in said


def test_torchs_rows_are_made_on_any_machine_and_tokens_follow_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    monkeypatch.setattr(train, "CONFIG", {**train.CONFIG, **small})
    monkeypatch.setattr(train, "SEQ", 32)
    monkeypatch.setattr(train, "NUDGED", 1)
    batch = train.tokens(0, "cpu")
    assert torch.equal(batch, train.tokens(0, "cpu"))
    follows = (batch[:, 1:] == (batch[:, :-1] * 5 + 17) % 64).float().mean()
    assert 0.8 < float(follows) < 1
    rows = [row for row, _ in train.run(4, (), "cpu")]
    assert [row.contender for row in rows] == ["torch bf16", "torch bf16, nudged 1", "torch fp32"]
    assert all(row.agrees == "yes" for row in rows)
    assert rows[0].last_loss == pytest.approx(rows[2].last_loss, rel=0.01)
    assert 0 < rows[0].gradient_error < 0.2
