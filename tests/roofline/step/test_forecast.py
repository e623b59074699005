"""A forecast keeps its contract, adds up, and moves the right way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.catalogue.prices import Price, parse_override
from flopcast.roofline.gpu.profile.host import NO_HOST
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import ORDERS, Forecast, Forecasts
from flopcast.roofline.step.priced_step import PricedStep, forecast
from flopcast.roofline.stream.lowering.classes import OP_CLASSES
from flopcast.roofline.stream.model.models import with_depth
from flopcast.roofline.stream.model.run import Run, run_from
from flopcast.roofline.stream.ops.op_stream import Stream

Tracing = Callable[..., Stream]

# What others script against (design, section 5): may grow, never shrink.
KEYS = {
    "gpu", "profile_basis", "mode", "n_params", "depth", "step_seconds", "step_seconds_low",
    "step_seconds_high", "device_seconds", "host_seconds", "host", "bound", "tokens_per_second",
    "flops_counted", "flops_6n", "mfu", "mfu_6n", "peak_flops_per_second", "peak_bytes", "fits", "breakdown",
    "usd_per_step", "flops_per_usd", "price", "stack", "precision", "optimizer",
}  # fmt: skip
PRICE = Price(
    gpu="test-gpu", provider="Somebody", kind="on-demand", usd_per_hour=3.6, date=date(2026, 11, 9),
    date_inferred=False, source="a test",
)  # fmt: skip


@pytest.fixture
def ask(tiny: dict[str, Any], traced: Tracing, profile: Profile) -> Callable[..., Forecast]:
    """ask(changed sizes of the model, run options): a forecast on the small profile."""

    def one(config: Mapping[str, Any] | None = None, *, on: Profile = profile, **options: Any) -> Forecast:
        run = Run(**{"batch": 2, "seq": 32, **options})
        stream = traced(config or tiny, batch=run.batch, seq=run.seq, optimizer=run.optimizer, precision=run.precision)
        return PricedStep(stream, run, on).forecast()

    return one


def test_the_contract(tiny: dict[str, Any], profile: Profile) -> None:
    found = forecast(tiny, Run(batch=2, seq=32), profile, price=PRICE)
    record = json.loads(json.dumps(found.to_json()))
    assert record.keys() >= KEYS
    assert all(row.keys() == {"class", "seconds", "flops", "bytes", "calls"} for row in record["breakdown"])
    assert record["price"] == {"usd_per_hour": 3.6, "provider": "Somebody", "date": "2026-11-09", "age_days": 0}
    assert record["usd_per_step"] == pytest.approx(0.001 * record["step_seconds"])
    assert record["flops_per_usd"] == pytest.approx(record["flops_counted"] / record["usd_per_step"])
    assert record["gpu"] == "test-gpu"
    assert record["depth"] == 3
    assert record["stack"]["profile"] == {"torch": "2.11.0"}
    assert record["stack"]["stream"].keys() == {"torch", "transformers"}
    free = forecast(tiny, Run(batch=2, seq=32), profile).to_json()
    assert free["price"] is free["usd_per_step"] is free["flops_per_usd"] is None
    assert free.keys() == record.keys()


def test_it_adds_up(ask: Callable[..., Forecast]) -> None:
    found = ask()
    assert sum(share.seconds for share in found.breakdown) == pytest.approx(found.device_seconds, rel=1e-12)
    assert sum(share.flops for share in found.breakdown) == found.flops_counted
    assert [share.op_class for share in found.breakdown] == [
        name for name in OP_CLASSES if name in {s.op_class for s in found.breakdown}
    ]
    tokens = 2 * 32
    assert found.tokens_per_second == pytest.approx(tokens / found.step_seconds)
    assert found.flops_6n == 6 * found.n_params * tokens
    assert found.mfu == pytest.approx(found.flops_counted / found.step_seconds / 9e14)
    assert found.mfu_6n == pytest.approx(found.flops_6n / found.step_seconds / 9e14)
    assert found.peak_flops_per_second == 9e14
    assert found.peak_bytes < found.needed_bytes
    assert found.fits
    assert found.step_seconds >= max(found.device_seconds, found.host_seconds) * (1 - 1e-9)


def test_the_interval_holds_the_forecast(ask: Callable[..., Forecast], profile: Profile) -> None:
    found = ask()
    assert found.step_seconds_low < found.step_seconds < found.step_seconds_high
    assert found.device_seconds_low < found.device_seconds < found.device_seconds_high
    assert profile.host is not None
    sure = replace(profile, host=replace(profile.host, sigma=0.01))
    assert ask(on=sure).step_seconds_high < found.step_seconds_high  # this step is bound by the host
    assert found.bound == "host"


def test_more_is_never_faster(ask: Callable[..., Forecast], tiny: dict[str, Any]) -> None:
    def rising(found: list[Forecast]) -> None:
        for name in ("step_seconds", "device_seconds", "flops_counted", "flops_6n", "peak_bytes"):
            values = [getattr(forecast, name) for forecast in found]
            assert values == sorted(values), name
        assert len({forecast.device_seconds for forecast in found}) == len(found)

    rising([ask(with_depth(tiny, depth)) for depth in (2, 3, 6, 12)])
    rising([ask(batch=batch) for batch in (2, 8)])
    rising([ask(seq=seq) for seq in (32, 64)])
    rising([ask(tiny), ask({**tiny, "hidden_size": 128, "intermediate_size": 384})])
    deep = ask(with_depth(tiny, 12))
    assert deep.host_seconds > 2 * ask(with_depth(tiny, 3)).host_seconds


def test_the_fused_optimizer_is_faster(ask: Callable[..., Forecast]) -> None:
    foreach, fused = ask(), ask(optimizer="adamw-fused")
    assert fused.device_seconds < foreach.device_seconds
    assert fused.kernels < foreach.kernels
    assert fused.flops_counted == foreach.flops_counted


def test_what_bounds(ask: Callable[..., Forecast], profile: Profile) -> None:
    alone = replace(profile, host=NO_HOST)
    assert ask(on=alone).bound in ("memory", "matrix")
    assert ask(on=alone).host_seconds == 0
    slow_matrix = replace(alone, peaks={k: Number(1e9, 1e9, 1e9, "measured") for k in profile.peaks})
    assert ask(on=slow_matrix).bound == "matrix"
    assert ask(on=replace(profile, device={**profile.device, "memory_bytes": 10**6})).fits is False
    cpu = replace(alone, device={**profile.device, "type": "cpu"})
    found = ask(on=cpu)
    assert found.step_seconds == pytest.approx(found.device_seconds)  # one after the other


def test_a_step_on_another_host_keeps_what_the_device_does(
    tiny: dict[str, Any], profile: Profile, traced: Callable[..., Stream]
) -> None:
    """The same forecast as made anew, from the same kernel times."""
    assert profile.host is not None
    slow = replace(profile.host, name="slow", step_fixed=0.1)
    step = PricedStep(traced(tiny), Run(), profile)
    moved = step.on_host(slow)
    assert moved.device_times is step.device_times
    assert moved.forecast() == PricedStep(traced(tiny), Run(), profile, slow).forecast()
    assert moved.forecast().step_seconds > step.forecast().step_seconds + 0.05


def test_another_host(tiny: dict[str, Any], profile: Profile) -> None:
    assert profile.host is not None
    slow = replace(profile.host, name="slow", forward={key: 10 * value for key, value in profile.host.forward.items()})
    own = forecast(tiny, Run(batch=2, seq=32), profile)
    other = forecast(tiny, Run(batch=2, seq=32), profile, host=slow)
    assert other.host == "slow"
    assert other.host_seconds > own.host_seconds
    assert other.device_seconds == own.device_seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch is 0: valid is an integer of at least 1"),
        ({"seq": -3}, "seq is -3"),
        ({"precision": "fp8"}, r"precision 'fp8': valid are autocast-bf16, autocast-fp16, bf16, tf32, fp32"),
        ({"optimizer": "lion"}, r"optimizer 'lion': valid are adamw, adamw-fused"),
        ({"mode": "max-autotune"}, "takes the GPU itself"),
        ({"mode": "compile", "fused": "triton"}, "compiled code fuses these operations itself"),
        ({"mode": "compile-graphs", "matmul": "triton"}, "calls cuBLAS"),
        ({"mode": "compile", "attention": "sdpa-flash"}, "what torch picked"),
        ({"mode": "fast"}, "valid are eager, compile"),
        ({"checkpoint": "half"}, "valid are none, full"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"matmul": "cutlass"}, "valid are torch, triton, best"),
        ({"attention": "flash"}, "valid are sdpa, sdpa-flash"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, tiny: dict[str, Any], profile: Profile) -> None:
    with pytest.raises(UsageError, match=message):
        forecast(tiny, Run(**options), profile)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, r"width \(hidden_size\) is 0"),
        ({"vocab_size": -1}, "vocab"),
        ({"num_hidden_layers": 0}, "depth"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "valid kv_heads are 1, 2, 3, 6"),
        ({"model_type": "no-such-model"}, "no-such-model"),
    ],
)
def test_bad_models(change: dict[str, Any], message: str, tiny: dict[str, Any], profile: Profile) -> None:
    with pytest.raises(UsageError, match=message):
        forecast({**tiny, **change}, Run(batch=1, seq=16), profile)


def test_options_by_name() -> None:
    assert run_from({}) == Run()
    assert run_from({"batch": 8, "seq": None, "width": 64, "optimizer": "adamw-fused"}) == Run(
        batch=8, optimizer="adamw-fused"
    )


def test_kernels_of_no_measured_kind_are_named(ask: Callable[..., Forecast], profile: Profile) -> None:
    warning = " ".join(ask().warnings)
    assert "no measured kind" in warning
    assert "copy _to_copy|fp32>bf16" in warning  # the costliest kinds by name
    assert ask(on=replace(profile, basis="projected")).warnings == ()


# --- several GPUs


def test_forecasts_print_as_a_table_and_escape_names(ask: Callable[..., Forecast]) -> None:
    cheap = replace(parse_override("nvidia-l4=1"), provider="R<&>D")
    fast = replace(ask(), gpu="<b>&", price=cheap)
    slow = replace(fast, gpu="slow", price=None, step_seconds=2 * fast.step_seconds)
    large = replace(fast, gpu="large", step_seconds=fast.step_seconds / 2, fits=False)
    found = Forecasts((slow, large, fast))
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["GPU", "slow", "large", "<b>&"]
    assert not any(line.endswith(" ") for line in lines)
    html = found._repr_html_()
    assert "&lt;b&gt;&amp;" in html
    assert "R&lt;&amp;&gt;D" in html
    assert "<b>" not in html
    assert "90% interval" in html
    orders = {order: [one.gpu for one in found.ordered(order)] for order in ORDERS}
    assert orders == {
        "asked": ["slow", "large", "<b>&"], "time": ["<b>&", "slow", "large"], "memory": ["slow", "<b>&", "large"],
        "dollars": ["<b>&", "slow", "large"], "gpu": ["<b>&", "large", "slow"],
    }  # fmt: skip
    with pytest.raises(UsageError, match="valid are asked, time"):
        found.ordered("price")
    assert str(Forecasts()) == "no forecasts"
