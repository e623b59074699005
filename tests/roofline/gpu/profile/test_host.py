"""Hosts by themselves: cost by layer with its spread, files, names, and several machines of one processor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.decode import decode
from flopcast.errors import DataError, UsageError
from flopcast.roofline.gpu.fit.host import fit_host, host_name, layer_costs, warm_value
from flopcast.roofline.gpu.library import profiles
from flopcast.roofline.gpu.profile.host import (
    CALL_OVER_FORWARD,
    VIEW_WEIGHT,
    HostCosts,
    combine,
    default_host,
    host_files,
    host_in,
    machines_of,
)
from flopcast.roofline.gpu.profile.host_graphs import ENTERING
from flopcast.roofline.views.terminal.gpus import layer_rows, print_hosts

DEPTHS = (2, 6, 12)
PER_LAYER = {"forward": 0.9e-3, "backward": 1.4e-3, "optimizer": 0.1e-3}
FIXED = 1e-3
OPS = 40  # launches a layer


def samples(seconds: float, cold: float, drift: tuple[float, ...]) -> list[float]:
    """Rounds of four steps, the first of each `cold` times as dear."""
    return [seconds * factor * share for share in drift for factor in (cold, 1.0, 1.0, 1.0)]


def rows(cold: float = 1.4, drift: tuple[float, ...] = (0.98, 1.0, 1.02), told: bool = True) -> list[dict[str, Any]]:
    found = []
    for depth in DEPTHS:
        for phase, per_layer in PER_LAYER.items():
            own = samples(FIXED + per_layer * depth, cold, drift)
            counts = {"launch": OPS * depth, "view": 0, "tensors": 11 * depth, "host": 0}
            row = {"key": f"host/qwen3-adamw/depth{depth}/{phase}", "status": "ok", "samples": own, "n": len(own),
                   "value": sorted(own)[len(own) // 2], "counts": counts}  # fmt: skip
            found.append({**row, "rounds": len(drift)} if told else row)
    return found


@pytest.fixture
def host() -> HostCosts:
    found = fit_host(rows(), {}, {}, {"cpu": "Intel(R) Xeon(R) Processor (family 6 model 207)"}, [])
    assert found is not None
    return found


def test_an_optimizer_s_call_on_one_tensor_is_a_call_like_the_forward_s(host: HostCosts) -> None:
    """Muon and Adafactor's loop run Python for every operator; lists of tensors are checked tensor by tensor."""
    call = CALL_OVER_FORWARD * host.forward["launch"]
    assert host.seconds("optimizer", "launch") == call
    assert host.seconds("optimizer", "sync") == call
    assert host.seconds("optimizer", "view") == VIEW_WEIGHT * call
    of_lists = host.seconds("optimizer", "launch", launches=3, tensors=7)
    assert of_lists == 3 * host.optimizer["launch"] + 7 * host.optimizer["per_tensor"]
    processor = replace(host, optimizer={"launch": 1e-6, "view": 2e-6, "host_op": 1e-6})
    assert processor.seconds("optimizer", "launch") == 1e-6, "a processor's was calibrated on such calls"


# --- by layer -----------------------------------------------------------------------------------------------


def test_cost_by_layer_comes_back_with_its_spread(host: HostCosts) -> None:
    assert (host.layers["model"], host.layers["mode"], host.layers["depths"]) == ("qwen3-adamw", "eager", [2, 6, 12])
    for phase, per_layer in PER_LAYER.items():
        layer = host.layers[phase]
        assert layer["seconds"] == pytest.approx(per_layer)
        assert layer["fixed"] == pytest.approx(FIXED)
        assert (layer["low"], layer["high"]) == pytest.approx((0.98 * per_layer, 1.02 * per_layer))
        assert layer["between"] == pytest.approx({"2-6": per_layer, "6-12": per_layer})
    step = host.layers["step"]
    assert step["seconds"] == pytest.approx(sum(PER_LAYER.values()))
    assert step["low"] == pytest.approx(0.98 * sum(PER_LAYER.values()))


def test_depths_that_disagree_show_between_them() -> None:
    bent = [{**row, "samples": [1.2 * s for s in row["samples"]]} if "depth12" in row["key"] else row for row in rows()]
    between = layer_costs(bent)["forward"]["between"]
    assert between["6-12"] > 1.3 * between["2-6"]


def test_the_first_step_after_a_pause_is_not_the_cost_but_in_the_spread(host: HostCosts) -> None:
    """Forward of depth 2 on an H200's host: 4.0 ms after a pause, 2.8 then."""
    assert warm_value(rows()[0]) == pytest.approx(FIXED + 2 * PER_LAYER["forward"])
    assert host.forward["launch"] * OPS == pytest.approx(PER_LAYER["forward"], rel=1e-3)
    untold = rows(told=False)[0]  # rows of old do not tell where a round begins
    assert warm_value(untold) == untold["value"]
    steady = fit_host(rows(cold=1.0), {}, {}, {"cpu": "c"}, [])
    wild = fit_host(rows(drift=(0.7, 1.0, 1.4)), {}, {}, {"cpu": "c"}, [])
    assert steady is not None
    assert wild is not None
    assert steady.sigma < wild.sigma


def test_one_depth_tells_no_layer(host: HostCosts) -> None:
    assert layer_costs([row for row in rows() if "depth6" in row["key"]]) == {}
    assert layer_costs([]) == {}
    torn = [row for row in rows() if row["key"] != "host/qwen3-adamw/depth6/forward"]  # a phase lost one of its depths
    assert 6 not in layer_costs(torn)["depths"]
    assert layer_rows(replace(host, layers={}))[0][1] == ""


def test_layers_are_shown_in_ms_with_their_spread(host: HostCosts) -> None:
    cells = {row[0]: row[1:] for row in layer_rows(host)}
    assert cells["forward"][:3] == ["0.900", "0.882 to 0.918", "2-6: 0.900, 6-12: 0.900"]
    assert cells["step"][0] == "2.400"


# --- compiled


def compiled_rows(mode: str, process: int, scale: float = 1.0) -> list[dict[str, Any]]:
    """Two depths of a compiled tiny model: 10 us per launch, and for a graph's entry as many as are known to."""
    found = []
    for depth in (2, 6):
        for phase, launches, entry in zip(("forward", "backward"), (30, 50), ENTERING, strict=True):
            own = samples(scale * 10e-6 * (entry.launches + launches * depth), 1.0, (0.98, 1.0, 1.02))
            counts = {"launch": float(launches * depth), "graph": 1.0}
            found.append({"key": f"host/qwen3-adamw-{mode}/process{process}/depth{depth}/{phase}", "status": "ok",
                          "samples": own, "n": len(own), "value": sorted(own)[len(own) // 2], "counts": counts,
                          "rounds": 3})  # fmt: skip
    return found


def test_compiled_tiny_models_calibrate_their_mode_and_no_other(host: HostCosts) -> None:
    def eager(process: int) -> list[dict[str, Any]]:
        return [{**row, "key": row["key"].replace("/depth", f"/process{process}/depth")} for row in rows()]

    measured = [*eager(0), *eager(1), *compiled_rows("compile", 0), *compiled_rows("compile", 1, scale=1.2)]
    found = fit_host(measured, {}, {}, {"cpu": host.cpu}, [])
    assert found is not None
    assert found.forward == pytest.approx(host.forward)
    assert list(found.compiled) == ["compile"]
    costs = found.graph_costs("compile")
    entries = (11e-6 * entry.launches for entry in ENTERING)
    assert (costs.launch, costs.forward, costs.backward) == pytest.approx((11e-6, *entries))
    assert costs.sigma == found.sigma  # two processes lie as far apart compiled as eager, as a third one will
    assert found.graph_costs("compile-graphs").sigma > default_host().graph_costs("compile-graphs").sigma


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        ("Intel(R) Xeon(R) Processor (family 6 model 207)", "intel-xeon-family-6-model-207"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon-2-20ghz"),
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763-64-core"),
        ("", "host"),
    ],
)
def test_a_host_is_named_after_its_processor(cpu: str, name: str) -> None:
    assert host_name(cpu) == name


# --- files --------------------------------------------------------------------------------------------------


def test_a_host_file_comes_back(host: HostCosts, tmp_path: Path) -> None:
    path = tmp_path / "new" / "host.json"
    host.save(path)
    assert HostCosts.load(path) == host
    assert host_in(path) == host
    assert json.loads(path.read_text())["kind"] == "host"


def test_fields_of_a_later_version_are_passed_over(host: HostCosts, tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text(json.dumps({**host.to_json(), "colour": "red"}))
    assert HostCosts.load(tmp_path / "h.json") == host


def spoilt(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda record: {**record, **fields}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoilt(schema=2), "upgrade flopcast"),
        (spoilt(schema=None), "a `schema` of 1 is expected"),
        (spoilt(kind="gpu"), "is no host"),
        (spoilt(forward=3), "forward is 3"),
        (spoilt(forward={"launch": "fast"}), "forward.launch is 'fast': valid is a number of 0 or more"),
        (spoilt(backward={"launch": -1e-6}), "backward.launch is -1e-06"),
        (spoilt(sigma=None), "sigma is None: valid is a number from 0 to 100"),
        (spoilt(step_fixed=1e400), "Infinity is not JSON"),
        (spoilt(layers={"step": {"low": 1.0}}), "layers.step.seconds is missing"),
        (spoilt(layers={"depths": 3}), "layers.depths is 3: valid is a list"),
        (spoilt(triton={"mm": True}), "triton.mm is True"),
        (spoilt(name=None), "name is None: valid is a text"),
        (lambda record: {k: v for k, v in record.items() if k != "optimizer"}, "optimizer"),
    ],
)
def test_a_spoilt_host_file_is_named(
    host: HostCosts, tmp_path: Path, spoil: Callable[[dict[str, Any]], dict[str, Any]], said: str
) -> None:
    path = tmp_path / "host.json"
    path.write_text(json.dumps(spoil(host.to_json())))
    with pytest.raises(DataError) as fault:
        HostCosts.load(path)
    assert said in str(fault.value)
    assert str(path) in str(fault.value)


def test_what_is_no_file_or_no_json_is_told(tmp_path: Path, host: HostCosts) -> None:
    with pytest.raises(DataError, match="bench --suite host"):
        HostCosts.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"schema": 1')
    with pytest.raises(DataError, match="not JSON"):
        host_in(tmp_path / "half.json")
    with pytest.raises(UsageError, match="--out"):
        host.save(Path("/proc/no/host.json"))


def test_the_shipped_hosts_are_measured_and_named_after_their_processor() -> None:
    shipped = {name: HostCosts.load(path) for name, path in host_files().items()}
    assert shipped
    for name, host in shipped.items():
        assert name == host.name == host_name(host.cpu)
        assert host.basis == "measured"
        assert host.date
        assert host.stack["torch"]
        assert 1e-4 < host.layers["forward"]["seconds"] < host.layers["step"]["seconds"] < 1e-1
        assert host.layers["forward"]["low"] < host.layers["forward"]["seconds"] < host.layers["forward"]["high"]


def test_a_listing_says_of_how_many_machines_a_host_is(host: HostCosts, capsys: pytest.CaptureFixture[str]) -> None:
    assert machines_of(host) == "1"
    several = combine([host, slower(host, 2.0), slower(host, 1.5)], of="machines")
    step = host.layers["step"]["seconds"] * 1e3
    assert machines_of(several) == f"3: {step:.1f} to {2 * step:.1f}"
    print_hosts(profiles.known_hosts())
    shown = capsys.readouterr().out
    for name, path in host_files().items():
        assert name in shown  # whole, to be copied
        machines = HostCosts.load(path).layers["step"]["machines"]
        assert f"{len(machines)}: {min(machines) * 1e3:.1f} to {max(machines) * 1e3:.1f}" in shown
    assert "of this CPU model" in shown


# --- several machines ---------------------------------------------------------------------------------------


def slower(host: HostCosts, factor: float) -> HostCosts:
    def times(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: times(inner) for name, inner in value.items()}
        return value * factor if isinstance(value, float) else value

    scaled = {phase: times(getattr(host, phase)) for phase in ("forward", "backward", "optimizer", "layers")}
    return replace(host, **scaled, step_fixed=host.step_fixed * factor)


def test_machines_of_one_processor_make_one_host_with_what_they_differ_by(host: HostCosts) -> None:
    both = combine([host, slower(host, 1.21)], of="machines")
    assert both.forward["launch"] == pytest.approx(1.1 * host.forward["launch"])
    assert both.layers["step"]["seconds"] == pytest.approx(1.1 * host.layers["step"]["seconds"])
    assert both.layers["forward"]["machines"] == pytest.approx([0.9e-3, 1.21 * 0.9e-3])
    # one more machine than two lies within Student's interval of them: t of 1 degree of freedom is 6.314
    between = 0.19062 / 2**0.5 * 1.5**0.5 * 6.314 / 1.6449
    assert both.sigma == pytest.approx((host.sigma**2 + between**2) ** 0.5, rel=1e-3)
    three = combine([host, slower(host, 1.1), slower(host, 1.21)], of="machines")
    assert host.sigma < three.sigma < both.sigma
    assert three.n_machines == 3
    assert combine([host], of="machines") == host
    assert decode(HostCosts, both.to_json(), "host") == both
    with pytest.raises(ValueError, match="one processor"):
        combine([host, replace(host, cpu="another")])
    assert asdict(both)["stack"] == host.stack
