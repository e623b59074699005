"""Kernels whose time follows neither from bytes nor from FLOPs are forecast within a factor, and it is said so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.lowering.classes import op_class
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.tracer.trace import trace_module
from flopcast.roofline.views.terminal.forecast import print_forecast

RUN = Run(precision="fp32")


class _Of(torch.nn.Module):
    """A function of a weighted input."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.weight, self.function = torch.nn.Parameter(torch.zeros(*shape)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight * x)


@pytest.fixture(scope="module")
def h200() -> Profile:
    return find_profile("nvidia-h200")


def forecast_of(function: Callable[[torch.Tensor], torch.Tensor], profile: Profile, *shape: int) -> Forecast:
    stream = trace_module(_Of(function, *shape), torch.zeros(*shape), Traced(precision="fp32"))
    return PricedStep(stream, RUN, profile).forecast()


# Shapes and milliseconds that such calls may well take on a large GPU: libraries' solvers take 20 to 60 ms for the
# eigenvalues of a matrix of 1024, whatever its 4 MB would take to read.
LINEAR_ALGEBRA: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...], float]] = {
    "eigh": (lambda a: torch.linalg.eigh(a)[0], (1024, 1024), 30.0),
    "many eigh": (lambda a: torch.linalg.eigh(a)[0], (64, 256, 256), 300.0),
    "svd": (lambda a: torch.linalg.svd(a)[1], (1024, 1024), 100.0),
    "inverse": (torch.linalg.inv, (1024, 1024), 5.0),
    "cholesky": (torch.linalg.cholesky, (1024, 1024), 3.0),
    "lu": (lambda a: torch.linalg.lu_factor(a)[0], (1024, 1024), 10.0),
    "qr": (lambda a: torch.linalg.qr(a)[1], (1024, 1024), 10.0),
    "solve": (lambda a: torch.linalg.solve(a, a), (1024, 1024), 10.0),
}


@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_decompositions_are_known_within_a_factor(name: str, h200: Profile) -> None:
    function, shape, milliseconds = LINEAR_ALGEBRA[name]
    found = forecast_of(function, h200, *shape)
    assert found.device_seconds_low < milliseconds / 1e3 < found.device_seconds_high
    assert found.step_seconds_high > 5 * found.step_seconds_low
    (said,) = (text for text in found.warnings if "within a factor only" in text)
    assert said.startswith("linalg ")
    assert "columns follow one another" in said


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda a: torch.fft.rfft(a).abs(), "Fourier"),
        (lambda a: a.cumprod(-1), "running sums"),
        (lambda a: torch.logcumsumexp(a, -1), "running sums"),
        (lambda a: a.kthvalue(3, -1)[0], "sorts"),
        (lambda a: torch.zeros_like(a).scatter_add(0, torch.zeros(a.shape, dtype=torch.int64), a), "shared places"),
        (lambda a: torch.zeros_like(a).index_add(0, torch.zeros(len(a), dtype=torch.int64), a), "shared places"),
        (lambda a: torch.cdist(a, a, p=1.0), "pairs"),
        (lambda a: torch.nn.functional.interpolate(a[None], scale_factor=2, mode="bilinear"), "windows"),
        (lambda a: torch.nn.functional.conv1d(a, torch.ones(128, 1, 5), groups=128), "grouped convolutions"),
    ],
)
def test_other_kinds_say_what_their_time_depends_on(
    function: Callable[[torch.Tensor], torch.Tensor], words: str, h200: Profile
) -> None:
    found = forecast_of(function, h200, 64, 128, 128)
    assert any(words in text and "within a factor only" in text for text in found.warnings), found.warnings


def test_a_library_of_ones_own_is_a_guess(h200: Profile) -> None:
    @torch.library.custom_op("mine::scan", mutates_args=())
    def scan(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @scan.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    scan.register_autograd(lambda ctx, grad: scan(grad))
    assert op_class("mine::scan") == op_class("mine.scan.default") == "custom"
    found = forecast_of(scan, h200, 1024, 1024)
    assert any("custom scan" in text and "FLOPs are not known" in text for text in found.warnings)
    assert found.device_seconds_high > 5 * found.device_seconds_low


# --- recurrent networks

BATCH, SEQ, SIZE, HIDDEN = 16, 64, 128, 256
GATES = {torch.nn.RNN: 1, torch.nn.GRU: 3, torch.nn.LSTM: 4}


def recurrent(kind: type[torch.nn.Module], precision: str = "fp32", **options: Any) -> tuple[torch.nn.Module, Stream]:
    module = kind(SIZE, HIDDEN, batch_first=True, **options)
    return module, trace_module(lambda: (module, torch.zeros(BATCH, SEQ, SIZE)), traced=Traced(precision=precision))


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_recurrent_layers_by_hand(kind: type[torch.nn.Module], options: dict[str, Any], h200: Profile) -> None:
    """Each place multiplies all weight matrices forward, and twice backward but for a gradient of the input."""
    module, stream = recurrent(kind, **options)
    found = PricedStep(stream, RUN, h200).forecast()
    matrices = sum(p.numel() for p in module.parameters() if p.ndim == 2)
    first = GATES[kind] * HIDDEN * SIZE * (2 if options else 1)
    assert found.flops_counted == 2 * BATCH * SEQ * (3 * matrices - first)
    assert found.device_seconds_high > 5 * found.device_seconds_low
    # one step after the other, each at least a microsecond, forward and backward
    assert found.device_seconds > 2 * SEQ * (4 if options else 1) * 1e-6
    assert any("steps follow one another" in text for text in found.warnings)
    assert not any("mkldnn" in op.name for op in stream.ops)


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
def test_one_call_does_the_work_of_all_its_steps(h200: Profile) -> None:
    """A processor's trace of the same layer multiplies step by step; its first step needs no gradient of its state."""
    module = torch.nn.GRU(SIZE, HIDDEN, batch_first=True)
    by_steps = trace_module(
        lambda: (module, torch.zeros(BATCH, SEQ, SIZE)), traced=Traced(precision="fp32", device="cpu")
    )
    _, at_once = recurrent(torch.nn.GRU)
    ratio = PricedStep(by_steps, RUN, h200).flops / PricedStep(at_once, RUN, h200).flops
    assert ratio == pytest.approx(1, abs=1 / SEQ)
    assert len(at_once.ops) < len(by_steps.ops) / 10


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
def test_autocast_and_projections_are_those_of_cudnn(h200: Profile) -> None:
    module, stream = recurrent(torch.nn.LSTM, "autocast-bf16", proj_size=64)
    calls = {op.name: stream.call(op) for op in stream.ops if "_cudnn_rnn" in op.name}
    assert {call.inputs[0].dtype for call in calls.values()} == {"bf16"}
    matrices = sum(p.numel() for p in module.parameters() if p.ndim == 2)
    found = PricedStep(stream, Run(), h200)
    assert found.flops == 2 * BATCH * SEQ * (3 * matrices - 4 * HIDDEN * SIZE)


# --- what is said


def test_terminal_and_json_name_a_range_and_no_time(h200: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    found = forecast_of(lambda a: torch.linalg.eigh(a)[0], h200, 512, 512)
    print_forecast(found, RUN)
    shown = capsys.readouterr()
    assert re.search(r"between [\d.]+ and [\d.,]+ ms", shown.out)
    assert "known within a factor only" in " ".join(shown.err.split())
    assert found.to_json()["warnings"] == list(found.warnings)


def test_a_projected_profile_says_so_too() -> None:
    found = forecast_of(lambda a: torch.linalg.eigh(a)[0], find_profile("nvidia-l4"), 512, 512)
    assert any("within a factor only" in text for text in found.warnings)
