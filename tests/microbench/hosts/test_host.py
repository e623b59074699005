"""What a step costs the host, by depth and phase, on the processor."""

from __future__ import annotations

from pathlib import Path

import torch

from flopcast.microbench.hosts import host
from flopcast.microbench.records import records
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.sweep.work import Summary
from flopcast.microbench.timing import device


class TinyStep:
    """A training step of `depth` layers."""

    def __init__(self, depth: int) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(depth)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def forward(self) -> torch.Tensor:
        result: torch.Tensor = self.model(torch.ones(2, 8)).sum()
        return result

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def run(self) -> None:
        self.backward(self.forward())


def test_host_costs_by_depth_and_phase(tmp_path: Path) -> None:
    def unbuildable() -> host.Step:
        raise torch.OutOfMemoryError("CUDA out of memory")

    builders = {2: lambda: TinyStep(2), 4: lambda: TinyStep(4), 1000: unbuildable}

    def run() -> Summary:
        with Recorder(tmp_path, device.describe(torch.device("cpu"))) as recorder:
            return host.run_host(
                builders, model="tiny-adamw", recorder=recorder, device=torch.device("cpu"), suite="quick",
                rounds=2, steps_per_round=3,
            )  # fmt: skip

    assert run().statuses == {"ok": 12, "oom": 6}
    rows = {row["key"]: row for row in records.read(tmp_path).rows}
    forward = rows["host/tiny-adamw/depth2/forward"]
    assert forward["n"] == len(forward["samples"]) == 6
    assert forward["value"] > 0
    parts = [rows[f"host/tiny-adamw/depth4/{phase}"]["value"] for phase in host.PHASES]
    assert rows["host/tiny-adamw/depth4/step"]["value"] >= max(parts)
    assert rows["host/tiny-adamw/depth1000/step"]["status"] == "oom"
    assert run().measured == 0
