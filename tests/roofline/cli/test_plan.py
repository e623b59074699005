"""`plan` and `prices` as scripts and people meet them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.cli.choose.plan import token_count
from flopcast.roofline.gpu.library import profiles
from flopcast.roofline.stream.model.models import load_config

H200 = "nvidia-h200"
Command = Callable[..., Any]
TWO = ("--gpus", f"{H200},nvidia-l4")
SMALL = ("--batch", 4, "--seq", 256)  # of shipped streams: nothing is traced


def test_plan_keeps_its_shape(flopcast: Command) -> None:
    found = flopcast("plan", "--width", 512, *TWO, *SMALL, "--tokens", "1B", "--budget-usd", 50, "--json")
    assert found.code == 0
    document = found.document
    assert document["tokens"] == 1e9
    assert [row["gpu"] for row in document["plans"]] == [H200, "nvidia-l4"]
    for row in document["plans"]:
        assert row["days_low"] < row["days"] < row["days_high"]
        assert row["usd"] == pytest.approx(row["seconds"] / 3600 * row["price_usd_per_hour"])
        assert row["tokens_for_budget"] == pytest.approx(50 / row["usd_per_million_tokens"] * 1e6)
        assert row["price_date"]
    assert document["cheapest"]["gpu"] in (H200, "nvidia-l4")


def test_plan_prints_a_row_a_gpu_and_its_price(flopcast: Command) -> None:
    out = flopcast("plan", "--config", "qwen3-0.6b", *TWO, *SMALL, "--price", "nvidia-l4=0.4").out
    for part in ("596M parameters, 28 layers", "11.9B tokens", "h200", "l4", "$0.4/h as given", "RunPod Secure Cloud",
                 "least dollars", "no evaluation"):  # fmt: skip
        assert part in " ".join(out.split())
    out = flopcast("plan", "--config", "qwen3-8b", "--gpus", "nvidia-l4", *SMALL).out
    assert "out of memory" in out
    assert "- l4: 4 x 256 tokens do not fit; a shorter --seq or --checkpoint full may" in out


def test_without_batch_and_seq_the_largest_that_fits_at_the_models_context(flopcast: Command, tmp_path: Path) -> None:
    config = {**load_config("qwen3-0.6b"), "hidden_size": 256, "num_hidden_layers": 3, "max_position_embeddings": 512}
    short, long = tmp_path / "short.json", tmp_path / "long.json"
    short.write_text(json.dumps(config))
    long.write_text(json.dumps({**config, "max_position_embeddings": 40960}))
    plan = ("plan", "--gpus", "nvidia-l4,nvidia-h200", "--tokens", "1B", "--on", "2026-11-15")
    rows = flopcast(*plan, "--config", short, "--json").document["plans"]
    assert [(row["seq"], row["is_largest_batch"]) for row in rows] == [(512, True)] * 2
    assert rows[0]["batch"] < rows[1]["batch"]  # each GPU has its own
    predict = ("predict", "--gpu", "nvidia-l4", "--config", short, "--seq", 512, "--json", "--batch")
    assert [flopcast(*predict, rows[0]["batch"] + more).document["fits"] for more in (0, 1)] == [True, False]
    out = " ".join(flopcast(*plan, "--config", short).out.split())
    assert f"{rows[0]['batch']} x 512" in out
    assert "the largest batch that fits on each GPU, sequences of 512 tokens, the model's own context" in out
    given = flopcast(*plan, "--config", long, "--batch", 1).out
    assert "batch: 1 sequences, sequences of 4,096 tokens, of the model's context of 40,960" in " ".join(given.split())
    own = flopcast(*plan, "--config", long, "--batch", 1, "--seq", 256, "--json").document["plans"][0]
    assert (own["batch"], own["seq"], own["is_largest_batch"]) == (1, 256, False)


def test_a_price_older_than_a_year_or_none_decides_no_plan(flopcast: Command) -> None:
    command = ("plan", "--width", 512, "--gpus", f"{H200},nvidia-l40s,nvidia-a10g", "--tokens", "1B", *SMALL)
    found = flopcast(*command, "--on", "2026-11-15", "--json").document
    h200, l40s, a10g = found["plans"]
    assert l40s["usd"] < h200["usd"]
    assert found["cheapest"] == {"gpu": H200, "contenders": []}
    assert (l40s["price_age_days"], l40s["unranked"]) == (518, "its price is 518 days old")
    assert (a10g["usd"], a10g["usd_per_million_tokens"], a10g["unranked"]) == (None, None, "no price")
    assert a10g["days"] > 0
    out = flopcast(*command, "--on", "2026-11-15", "--budget-usd", 50).out
    for part in ("least dollars: h200", "not ranked: l40s, its price is 518 days old", "not ranked: a10g, no price"):
        assert part in out
    assert flopcast(*command, "--on", "2025-07-01", "--json").document["cheapest"]["gpu"] == "nvidia-l40s"
    unpriced = flopcast("plan", "--budget-usd", 60, "--gpus", "nvidia-a10g", "--widths", 256)
    assert (unpriced.code, "no price" in unpriced.out) == (0, True)


def test_a_budget_alone_asks_for_the_largest_model(flopcast: Command) -> None:
    command = ("plan", "--budget-usd", 60, "--gpus", H200, "--widths", "256,512,1024")
    found = flopcast(*command, "--json").document
    (row,) = found["largest"]
    assert (row["gpu"], row["limited_by"], row["cost_usd"]) == (H200, "budget", 60)
    assert row["low"] < row["n_params"] < row["high"]
    assert found["tokens_per_parameter"] == 20
    out = flopcast(*command, "--tokens-per-param", 1).out
    assert "at 1 tokens per parameter" in " ".join(out.split())


def test_several_gpus_are_planned_in_their_faster_layout_and_all_paid_for(flopcast: Command) -> None:
    model = ("--width", 256, "--depth", 3, "--tokens", "1B", "--batch", 4, "--seq", 64, "--gpus", H200)
    alone, both, ddp = (
        flopcast("plan", *model, *more, "--json").document["plans"][0]
        for more in ((), ("--num-gpus", 2), ("--parallel", "ddp=2"))
    )
    assert (alone["num_gpus"], alone["parallel"], both["num_gpus"]) == (1, None, 2)
    assert both["tokens_per_step"] == 2 * alone["tokens_per_step"]
    assert both["seconds"] <= ddp["seconds"]
    assert both["usd"] / both["seconds"] == pytest.approx(2 * alone["usd"] / alone["seconds"])
    assert "on 2 GPUs" in flopcast("plan", *model, "--parallel", "ddp=2").out


BAD = {
    "two numbers of GPUs": ("--width 512 --num-gpus 8 --parallel ddp=2", ("--num-gpus 8", "which is 2", "give one")),
    "no GPUs": ("--width 512 --num-gpus 0", ("num_gpus is 0", "valid are 1 to")),
    "no mode": ("--width 512 --mode fast", ("'fast'", "compile-graphs")),
    "nothing asked": ("", ("--config", "--width", "--budget-usd")),
    "tokens that are none": ("--width 512 --tokens many", ("'many'", "10B")),
    "no tokens": ("--width 512 --tokens 0", ("--tokens is '0'",)),
    "a batch that is none": ("--width 512 --batch big", ("'big'", "auto")),
    "no batch": ("--width 512 --batch 0", ("batch is 0",)),
    "no budget": ("--width 512 --budget-usd 0", ("--budget-usd is 0",)),
    "a budget and no model": ("--budget-usd 5 --batch auto", ("--batch auto", "--config")),
    "no tokens a parameter": ("--width 512 --tokens-per-param -1", ("--tokens-per-param is -1",)),
    "a provider for no GPU": ("--width 512 --gpus nvidia-l4 --provider nvidia-h200=Lambda", ("none of the GPUs",)),
    "hosts that are none": ("--width 512 --gpus nvidia-l4 --hosts both", ("'both'", "own, same")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_use_of_plan_says_what_is_valid(flopcast: Command, case: str) -> None:
    options, parts = BAD[case]
    found = flopcast("plan", *options.split())
    assert (found.code, found.out) == (2, "")
    assert "Traceback" not in found.err
    for part in parts:
        assert part in found.err


@pytest.mark.parametrize(
    ("text", "count"), [("10B", 1e10), ("300M", 3e8), ("1.5e9", 1.5e9), ("2,000", 2000), ("1T", 1e12), ("7k", 7e3)]
)
def test_tokens_are_read_as_people_write_them(text: str, count: float) -> None:
    assert token_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "-5", "1.2.3", "ten", "0.5"])
def test_tokens_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--tokens is"):
        token_count(text)


# --- prices

SKYPILOT = """InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Region,SpotPrice,Price
1x_A100-80GB_SECURE,A100-80GB,1.0,8.0,80.0,A100-80GB,CA,1.19,1.64
1x_H100-SXM_SECURE,H100-SXM,1.0,8.0,80.0,H100-SXM,CA,2.69,2.99
2x_L40S_SECURE,L40S,2.0,8.0,80.0,L40S,CA,1.72,0.86
"""


@pytest.fixture
def catalogue(tmp_path: Path) -> Path:
    path = tmp_path / "runpod" / "vms.csv"
    path.parent.mkdir()
    path.write_text(SKYPILOT)
    return path


def test_prices_lists_the_newest_of_each(flopcast: Command) -> None:
    rows = flopcast("prices", "--gpu", "nvidia-h100-sxm", "--json").document["prices"]
    assert {row["gpu"] for row in rows} == {"nvidia-h100-sxm"}
    secure = [row for row in rows if row["provider"] == "RunPod Secure Cloud" and row["kind"] == "on-demand"]
    assert [(row["usd_per_hour"], row["date"]) for row in secure] == [(3.99, "2026-11-09")]
    out = flopcast("prices", "--provider", "Lambda", "--on", "2026-07-01").out
    assert "4.29" in out
    assert "RunPod" not in out


def test_a_catalogue_becomes_a_book_and_its_bad_rows_are_named(
    flopcast: Command, catalogue: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine.csv"
    found = flopcast(
        "prices", "--from", catalogue, "--date", "2025-06-15", "--alias", "A100-80GB=nvidia-a100-80gb-pcie",
        "--out", out,
    )  # fmt: skip
    assert found.code == 0
    assert "refused line 4: SpotPrice 1.72 of L40S is above its Price 0.86" in found.err
    rows = list(csv.DictReader(out.open(newline="")))
    assert [(r["gpu"], r["kind"], r["usd_per_hour"], r["date"]) for r in rows] == [
        ("nvidia-a100-80gb-pcie", "on-demand", "1.64", "2025-06-15"),
        ("nvidia-a100-80gb-pcie", "spot", "1.19", "2025-06-15"),
        ("nvidia-h100-sxm", "on-demand", "2.99", "2025-06-15"),
        ("nvidia-h100-sxm", "spot", "2.69", "2025-06-15"),
    ]
    point = flopcast(
        "cost", "--gpus", "nvidia-h100-sxm", "--widths", 512, "--prices", out, "--kind", "spot", "--json"
    ).document["points"][0]
    assert (point["price_usd_per_hour"], point["price_kind"], point["price_date_inferred"]) == (2.69, "spot", False)


def test_cost_reads_a_catalogue_itself(flopcast: Command, catalogue: Path) -> None:
    found = flopcast("cost", "--gpus", "nvidia-h100-sxm", "--widths", 512, "--prices", catalogue, "--json")
    point = found.document["points"][0]
    assert (point["price_usd_per_hour"], point["price_date_inferred"]) == (2.99, True)
    assert "refused line 2: A100-80GB is ambiguous" in found.err


def test_providers_differ_by_gpu(flopcast: Command) -> None:
    command = ("cost", "--gpus", f"{H200},nvidia-l4", "--widths", 512, "--json")
    found = flopcast(*command, "--provider", "RunPod Secure Cloud", "--provider", f"{H200}=Hyperstack").document
    assert {p["gpu"]: p["price_provider"] for p in found["points"]} == {
        H200: "Hyperstack",
        "nvidia-l4": "RunPod Secure Cloud",
    }


PRICES_BAD = {
    "two sources": ("--from a.csv --refresh gpuhunt", ("give one",)),
    "another source": ("--refresh web", ("'web'", "gpuhunt")),
    "no such file": ("--from none.csv", ("none.csv", "does not exist")),
    "a date for nothing": ("--date 2025-01-01", ("--from",)),
    "a date that is none": ("--from x.csv --date June", ("'June'", "YYYY-MM-DD")),
    "an alias that is none": ("--from x.csv --alias A100", ("'A100'", "NAME=GPU")),
    "an alias for no GPU": ("--from x.csv --alias A100=a10", ("unknown GPU 'a10'",)),
    "an alias for several GPUs": ("--from x.csv --alias A100=a100", ("GPU 'a100' is ambiguous", "name the board")),
    "a GPU without a row": ("--gpu nvidia-a10g", ("no price",)),
}


@pytest.mark.parametrize("case", PRICES_BAD)
def test_bad_use_of_prices_says_what_is_valid(
    flopcast: Command, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options, parts = PRICES_BAD[case]
    found = flopcast("prices", *options.split())
    assert (found.code, found.out) == (2, "")
    for part in parts:
        assert part in found.err


@pytest.mark.parametrize(
    "arguments", ["", "--config qwen3-0.6b --tokens nan", "--config no-such", "--budget-usd 5 --widths x"]
)
def test_what_is_asked_wrong_is_told_before_a_profile_is_read(
    flopcast: Command, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.setattr(profiles, "find_profiles", lambda gpus: pytest.fail("a profile was read"))
    assert flopcast("plan", *arguments.split()).code == 2


MODULES = """import torch
def net(width=256, batch=16):
    return torch.nn.Linear(width, width), torch.randn(batch, 2048, width)
def fixed():
    return net()
def bare(width):
    return net(width)
def picky(width=256):
    if width != 256:
        raise ValueError(f"no such size: {width}")
    return net(width)
def step():
    model = torch.nn.Linear(64, 64)
    adam = torch.optim.AdamW(model.parameters())
    def run():
        model(torch.randn(8, 64)).square().mean().backward()
        adam.step()
        adam.zero_grad()
    return run
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(MODULES)


@pytest.mark.usefixtures("modules")
def test_a_module_is_planned_by_its_samples(flopcast: Command) -> None:
    ask = ("plan", "--module", "nets.py:net", "--gpus", "l4,h200", "--samples", "10M", "--on", "2026-11-15")
    l4, h200 = flopcast(*ask, "--json").document["plans"]
    assert (l4["unit"], l4["seq"], l4["tokens"]) == ("samples", 1, 10e6)
    assert 1000 < l4["batch"] < h200["batch"]
    own = flopcast(*ask, "--batch", "64", "--json").document["plans"][0]
    step = flopcast("predict", "--gpu", "l4", "--module", "nets.py:net", "--batch", 64, "--json").document
    assert own["step_seconds"] == pytest.approx(step["step_seconds"])
    assert own["seconds"] == pytest.approx(own["step_seconds"] * 10e6 / 64)
    shown = flopcast(*ask).out
    for part in ("on 10M samples", "samples/s", "$/Msample", "batch: the largest that fits on each GPU"):
        assert part in shown
    (fixed,) = flopcast("plan", "--module", "nets.py:fixed", "--gpus", "l4", "--samples", "1M", "--json").document[
        "plans"
    ]
    assert fixed["batch"] == 16


MODULES_BAD = {
    "no number of samples": ("plan --module nets.py:fixed --gpus l4", ("how many samples?", "--tokens")),
    "a config too": ("plan --module nets.py:net --config gpt2", ("--config gpt2", "with --module")),
    "a batch of a fixed factory": ("plan --module nets.py:fixed --batch 4 --samples 1M", ("no parameter 'batch'",)),
    "the largest of a step function": (
        "plan --module nets.py:step --batch auto --gpus l4 --samples 9", ("batch of a step function is not known",)),
    "widths of a module without": ("cost --module nets.py:fixed --widths 512", ("no parameter 'width'",)),
    "widths of a factory without": (
        "widths --gpu l4 --module nets.py:fixed", ("no parameter `width`", "def factory(width=", "cost --module")),
    "widths of a module and a config's axis": (
        "widths --gpu l4 --module nets.py:net --axis ffn", ("--axis ffn with --module", "leave it out")),
    "widths of a module without the shapes": (
        "widths --gpu l4 --module nets.py:net --no-shapes", ("--no-shapes with --module", "leave it out")),
    "widths of a module with heads": ("widths --gpu l4 --module nets.py:net --heads 4", ("--module with --heads",)),
    "widths of a module around none": (
        "widths --gpu l4 --module nets.py:net --around 0", ("--around is 0", "at least 1")),
    "widths that a factory refuses": (
        "widths --gpu l4 --module nets.py:picky --around 300", ("at width 300", "no such size: 300")),
    "widths too few to compare": (
        "widths --gpu l4 --module nets.py:picky --around 256", ("takes too few to compare", "no such size")),
    "widths without a default": ("widths --gpu l4 --module nets.py:bare", ("no default", "--around")),
    "a law of a module": ("cost --module nets.py:net --depth-law ln", ("--depth-law ln", "with --module")),
}  # fmt: skip


@pytest.mark.parametrize("case", MODULES_BAD)
@pytest.mark.usefixtures("modules")
def test_bad_use_of_a_module_says_what_is_valid(flopcast: Command, case: str) -> None:
    command, parts = MODULES_BAD[case]
    found = flopcast(*command.split())
    assert found.code == 2
    assert [part for part in parts if part not in found.err] == []


@pytest.mark.usefixtures("modules")
def test_a_module_has_a_cost_at_its_own_width_or_at_several(flopcast: Command) -> None:
    ask = ("cost", "--module", "nets.py:net", "--gpus", "l4,h200", "--on", "2026-11-15")
    document = flopcast(*ask, "--widths", "512,1024", "--json").document
    assert [size["width"] for size in document["ladder"]] == [512, 1024]
    assert [point["gpu"] for point in document["points"]] == ["nvidia-l4"] * 2 + ["nvidia-h200"] * 2
    shown = flopcast(*ask).out
    assert "16 tokens or samples per step" in " ".join(shown.split())
    assert "Break-even" in shown
