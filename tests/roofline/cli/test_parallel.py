"""`--parallel`: a step on several GPUs by predict, explain and sweep, from the command line on."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cache_of_the_module")

SMALL = ("--width", "256", "--depth", "2", "--vocab", "1024", "--batch", "2", "--seq", "64")
H200 = ("--gpu", "H200", "--optimizer", "adamw-fused")


Flopcast = Callable[..., Any]


@pytest.fixture
def predicted(flopcast: Flopcast) -> Callable[..., dict[str, Any]]:
    def predict(*options: str) -> dict[str, Any]:
        done = flopcast("predict", *H200, *SMALL, *options, "--json")
        assert done.code == 0, done.err
        found: dict[str, Any] = done.document
        return found

    return predict


Predicted = Callable[..., dict[str, Any]]


def test_a_step_on_several_gpus_is_forecast(predicted: Predicted) -> None:
    alone, both = predicted(), predicted("--parallel", "fsdp=2")
    assert (both["parallel"], both["num_gpus"], both["nodes"], both["link"]) == ("fsdp=2", 2, 1, "nvidia-h200")
    assert "parallel" not in alone
    for one in (alone, both):
        assert sum(one["memory"].values()) == one["peak_bytes"]
    assert "communication" not in alone["memory"]
    assert alone["memory"]["weights"] == pytest.approx(4 * alone["n_params"], rel=0.01)
    assert sum(both["memory"].values()) == both["peak_bytes"]
    assert both["memory"]["weights"] == pytest.approx(4 * both["n_params"] / 2, rel=0.02)
    assert both["memory"]["communication"] > 0
    assert both["flops_counted"] == 2 * alone["flops_counted"]
    assert both["n_params"] == both["n_params_trained"] == alone["n_params"]
    assert both["tokens_per_second"] * both["step_seconds"] == pytest.approx(2 * 2 * 64)
    assert 0 < both["exposed_communication_seconds"] <= both["communication_seconds"]
    assert both["usd_per_step"] / both["step_seconds"] == pytest.approx(
        2 * alone["usd_per_step"] / alone["step_seconds"]
    )
    assert both["step_seconds_low"] < both["step_seconds"] < both["step_seconds_high"]
    assert not [said for said in both["warnings"] if "by law" in said]  # two GPUs of one host were measured


def test_a_model_divided_by_tensor_parallel_counts_its_flops_once(predicted: Predicted) -> None:
    heads = ("--heads", "2", "--kv-heads", "2")
    alone, divided = predicted(*heads), predicted(*heads, "--parallel", "tp=2")
    assert divided["flops_counted"] == alone["flops_counted"]
    assert divided["flops_hardware"] > divided["flops_counted"]  # the head is whole on both


def test_a_slower_link_and_more_hosts_take_longer(predicted: Predicted) -> None:
    usual = predicted("--parallel", "ddp=8")
    slower = predicted("--parallel", "ddp=8", "--link", "pcie4")
    apart = predicted("--parallel", "ddp=8", "--nodes", "8")
    assert slower["link"] == "pcie4"
    assert apart["nodes"] == 8
    assert usual["communication_seconds"] < min(slower["communication_seconds"], apart["communication_seconds"])
    assert usual["peak_bytes"] == slower["peak_bytes"]


def test_it_is_explained_and_told(flopcast: Flopcast) -> None:
    step = (*H200, *SMALL, "--parallel", "fsdp=2")
    assert "communication that no kernel hides" in flopcast("explain", *step).out
    parts = flopcast("explain", *step, "--json").document["step"]
    names = ("device", "power", "gap", "idle", "contention", "exposed_communication")
    assert sum(parts[f"{name}_seconds"] for name in names) == pytest.approx(parts["seconds"], rel=1e-6)
    told = flopcast("predict", *step).out
    assert "over fsdp=2" in told
    assert "of 2 GPUs each" in told


def test_a_pipelines_bubble_is_told_apart(flopcast: Flopcast) -> None:
    small = (*SMALL[:2], "--depth", "4", *SMALL[4:], "--accumulate", "2")
    step = (*H200, *small, "--host", "none", "--parallel", "pp=2")
    assert "in which the last stage waits for others" in flopcast("predict", *step).out
    both, alone = (flopcast("predict", *some, "--json").document for some in (step, step[:-2]))
    parts = ("device", "exposed_communication", "contention", "bubble")
    assert sum(both[f"{part}_seconds"] for part in parts) < both["step_seconds"]
    assert 0.1 < both["bubble_seconds"] / both["step_seconds"] < 0.5  # a third, if forward and backward were all
    assert both["flops_counted"] == pytest.approx(alone["flops_counted"], rel=1e-4)  # each stage turns positions anew
    assert both["n_params"] == alone["n_params"]
    assert both["peak_bytes"] < alone["peak_bytes"]


def test_a_table_of_layouts(flopcast: Flopcast, tmp_path: Path) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    step = "256,2,1024,2,64,adamw-fused"
    rows = [f"{step},{layout}" for layout in ("fsdp=2", "none", "zero=2")]
    source.write_text("\n".join(["width,depth,vocab,batch,seq,optimizer,parallel", *rows]))
    assert flopcast("sweep", "--gpu", "H200", "--from", source, "--out", out).code == 0
    both, alone, wrong = csv.DictReader(out.open())
    assert (both["num_gpus"], alone["num_gpus"]) == ("2", "")
    assert int(both["memory_weights"]) < int(alone["peak_bytes"])
    assert "'zero=2' is no part of a layout" in wrong["reason"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--parallel", "ddp"), "'ddp' is no part of a layout; valid are ddp=8"),
        (("--parallel", "zero1=2,pp=2"), "pp and zero1 are not modelled together; valid together are zero2"),
        (("--parallel", "tp=3"), "tp=3 does not divide heads 2"),
        (("--depth", "3", "--parallel", "pp=3"),
         "1f1b needs at least as many as stages; valid are accumulate 3 and above"),
        (("--depth", "3", "--parallel", "pp=2:gpipe"), "pp=2 does not divide layers 3: valid are 1, 3"),
        (("--parallel", "ep=2"), "ep=2: the model has no experts to divide; leave ep out"),
        (("--parallel", "tp=2", "--mode", "compile"), "mode compile with parallel tp=2: what torch compiles of layers"),
        (("--parallel", "ddp=2", "--mode", "compile-graphs"), "mode compile-graphs with parallel ddp=2: a CUDA graph"),
        (("--parallel", "ddp=8", "--nodes", "3"), "nodes is 3: it does not divide the 8 GPUs"),
        (("--parallel", "ddp=2", "--link", "rope"), "unknown link 'rope': valid are"),
        (("--nodes", "2"), "nodes 2 of a step on one GPU: give --parallel"),
        (("--link", "pcie4"), "link pcie4 of a step on one GPU: give --parallel"),
    ],
)  # fmt: skip
def test_what_cannot_be_exits_with_2(flopcast: Flopcast, options: tuple[str, ...], said: str) -> None:
    done = flopcast("predict", *H200, *SMALL, *options)
    assert done.code == 2
    assert said in " ".join(done.err.split())


@pytest.mark.parametrize("layout", ["ddp=2", "fsdp=2"])
def test_a_module_is_laid_out_too(flopcast: Flopcast, layout: str) -> None:
    module = ("--module", "flopcast.microbench.zoo:mlp", "--batch", "64")
    alone = flopcast("predict", *H200, *module, "--json").document
    both = flopcast("predict", *H200, *module, "--parallel", layout, "--json").document
    assert both["tokens_per_second"] * both["step_seconds"] == pytest.approx(2 * 64)  # samples
    assert both["flops_counted"] == 2 * alone["flops_counted"]
    assert both["n_params"] == alone["n_params"]
    assert both["communication_seconds"] > 0
    share = 1 if layout == "ddp=2" else 2
    assert both["memory"]["weights"] * share == pytest.approx(alone["memory"]["weights"], rel=0.01)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--module", "flopcast.microbench.zoo:mlp", "--parallel", "tp=2"), "only configs say how their layers"),
        (("--module", "STEP", "--parallel", "ddp=2"), "of a step function, whose module cannot be laid out anew"),
        (("--gpu", "cpu", *SMALL, "--parallel", "ddp=2"), "on processors"),
    ],
)
def test_what_has_no_layout_exits_with_2(
    flopcast: Flopcast, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    source = tmp_path / "own.py"
    source.write_text(
        "import torch\nm = torch.nn.Linear(8, 8)\ndef step():\n    return m(torch.zeros(2, 8)).sum().backward()\n"
    )
    gpu = () if "--gpu" in options else ("--gpu", "H200")
    done = flopcast("predict", *gpu, *(option.replace("STEP", f"{source}:step") for option in options))
    assert (done.code, said in " ".join(done.err.split())) == (2, True)


def test_layouts_are_ranked(flopcast: Flopcast) -> None:
    step = (*H200, *SMALL, "--depth", "1", "--heads", "2", "--kv-heads", "1", "--parallel", "auto")
    done = flopcast("predict", *step, "--num-gpus", "2")
    assert done.code == 0, done.err
    assert "5 of 5 layouts fit" in " ".join(done.out.split())
    assert "fastest: " in done.out
    assert "left out 1: tp=2 does not divide" in done.out
    found = flopcast("predict", *step, "--num-gpus", "2", "--clip", "1", "--json").document
    assert {one["parallel"] for one in found["fitting"]} == {"ddp=2", "zero1=2", "zero2=2", "fsdp=2", "cp=2"}
    assert found["refused"]
    assert all("clip 1.0 with parallel" in one["reason"] for one in found["refused"])
    for options, said in (((), "give --num-gpus"), (("--num-gpus", "2", "--gpus", "H200,L4"), "--parallel auto")):
        assert said in flopcast("predict", *step, *options).err
    assert "--num-gpus 2 without --parallel auto" in flopcast("predict", *H200, *SMALL, "--num-gpus", "2").err


def test_a_step_is_scaled(flopcast: Flopcast, tmp_path: Path) -> None:
    module = ("--module", "flopcast.microbench.zoo:mlp", "--batch", "4096", "--num-gpus", "2", "--parallel", "ddp")
    done = flopcast("scale", *H200, *module, "--vary", "width=512,1024", "--out", tmp_path, "--json")
    assert done.code == 0, done.err
    small, large = done.document["answers"]
    assert (small["sizes"], large["sizes"]) == ({"width": 512}, {"width": 1024})
    assert [point["num_gpus"] for point in small["strong"]["points"]] == [1, 2]
    rows = list(csv.DictReader((tmp_path / "scale.csv").open()))
    assert {(row["width"], row["kind"], row["num_gpus"]) for row in rows} == {
        (width, kind, gpus) for width in ("512", "1024") for kind in ("strong", "weak") for gpus in ("1", "2")
    }
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    for options, said in (
        (("--parallel", "ddp=2"), "one part of which has no number"),
        (("--num-gpus", "0"), "valid are 1 to"),
        (("--batch", "0"), "--batch is 0"),
        (("--vary", "size=2"), "--vary size=2: valid is"),
        (("--worth", "2"), "worth is 2"),
    ):
        wrong = flopcast("scale", *H200, *SMALL[:6], *options)
        assert (wrong.code, said in " ".join(wrong.err.split())) == (2, True)
