"""`roofline` and `explain` as scripts and people meet them: files, documents, exit codes, what is not loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

H200 = ("--gpu", "nvidia-h200")
STEP = ("explain", *H200, "--width", "256")
Run = Callable[..., Any]


def test_the_roofline_is_written_as_png_and_svg(flopcast: Run, tmp_path: Path) -> None:
    png, svg = tmp_path / "new" / "roofline.png", tmp_path / "roofline.svg"
    code, out, err = flopcast("roofline", *H200, "--out", png, "--json")
    found = json.loads(out)
    assert (code, found["figure"], err) == (0, str(png), f"wrote {png}\n")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert {roof["dtype"] for roof in found["matrix"]} >= {"bf16", "fp16", "tf32", "fp32", "fp64", "fp8"}
    assert {"hbm_read", "hbm_write", "hbm_copy"} == set(found["bandwidths"])
    assert len(found["points"]) > 500
    for point in found["points"][::50]:
        assert point["seconds"] > 0
        assert point["class"]
        assert point["backend"]
    assert flopcast("roofline", "--gpu", "nvidia-l4", "--out", svg, "--theme", "dark")[0] == 0
    root = ET.fromstring(svg.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "roofline.jpg"), ("'roofline.jpg'", ".png", ".svg")),
        (("--theme", "blue"), ("'blue'", "light, dark")),
        (("--dtype", "int8"), ("'int8'", "bf16")),
    ],
)
def test_bad_use_of_roofline_says_what_is_valid(
    flopcast: Run, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    code, out, err = flopcast("roofline", *H200, *arguments)
    assert (code, out) == (2, "")
    assert all(word in err for word in words)
    assert "Traceback" not in err


def test_a_figure_that_cannot_be_written_is_bad_use(flopcast: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = flopcast("roofline", *H200, "--out", tmp_path / "file" / "roofline.png")
    assert code == 2
    assert "--out" in err


def test_explain_is_one_document_that_predict_gives_too(flopcast: Run) -> None:
    code, out, err = flopcast(*STEP, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert set(found) == {
        "forecast",
        "step",
        "speed_of_light",
        "classes",
        "modules",
        "synchronisations",
        "alternatives",
        "modes",
    }
    assert found["forecast"] == json.loads(flopcast("predict", *STEP[1:], "--json")[1])
    assert json.loads(flopcast("predict", *STEP[1:], "--explain", "--json")[1]) == found
    device = found["forecast"]["device_seconds"]
    assert sum(part["seconds"] for part in found["classes"]) == pytest.approx(device)
    assert sum(part["seconds"] for part in found["modules"]) == pytest.approx(device)
    light = found["speed_of_light"]
    assert light["fused_seconds"] <= light["seconds"] <= device
    assert "parameters" in light["counted"]
    options = {a["option"]: a for a in found["alternatives"]}
    assert options["--host none"]["kind"] == "bound"
    assert options["--optimizer adamw-fused"]["step_seconds"] < found["forecast"]["step_seconds"]


def test_explain_tells_a_person_the_same(flopcast: Run) -> None:
    code, out, _ = flopcast(*STEP)
    assert code == 0
    headings = ("Device time by class", "Device time by module", "Synchronisations", "What would help")
    contents = ("model.layers.*.mlp.down_proj", "speed of light", "aten._local_scalar_dense in model", "no host *",
                "* a bound of CUDA graphs")  # fmt: skip
    for words in (*headings, *contents):
        assert words in out


def test_explain_takes_what_predict_takes(flopcast: Run) -> None:
    def options(command: str) -> set[str]:
        return {word.rstrip(":,.;") for word in flopcast(command, "--help")[1].split() if word.startswith("--")}

    of_many = {"--explain", "--largest-batch", "--gpus", "--sort", "--num-gpus"}
    of_batches = {"--input", "--workers", "--load-ms"}  # what feeds the step; explain is of the step itself
    assert options("predict") - options("explain") == of_many | of_batches
    code, _, err = flopcast(*STEP, "--precision", "int8")
    assert code == 2
    assert "precision 'int8'" in err


MODULE = """
import torch
def wide(batch=4):
    layers = torch.nn.Linear(256, 1_000_000), torch.nn.GELU(), torch.nn.Linear(1_000_000, 4)
    return torch.nn.Sequential(*layers), torch.randn(batch, 256)
"""


def test_a_step_without_products_is_explained(flopcast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scaled.py").write_text(
        "import torch\nclass Scaled(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.ones(64))\n    def forward(self, x):\n        return x * self.w\n"
        "def scaled():\n    return Scaled(), torch.randn(8, 64)\n"
    )
    code, out, err = flopcast("explain", "--gpu", "nvidia-h200", "--module", "scaled:scaled", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["forecast"]["flops_counted"] == 0
    gained = [a for a in found["alternatives"] if a["gain"] is not None]
    assert gained
    assert {a["flops_gain"] for a in gained} == {None}


def test_a_module_is_explained_and_its_largest_batch_found(
    flopcast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text(MODULE)
    step = ("--gpu", "nvidia-l4", "--module", "theirs:wide")
    code, out, err = flopcast("explain", *step, "--batch", 64, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["forecast"]["tokens_per_second"] * found["step"]["seconds"] == pytest.approx(64)
    device = found["forecast"]["device_seconds"]
    assert sum(part["seconds"] for part in found["modules"]) == pytest.approx(device)
    assert {part["op_class"] if "op_class" in part else part["class"] for part in found["classes"]} >= {"gemm"}
    assert "--optimizer adamw-fused" in {a["option"] for a in found["alternatives"]}
    assert json.loads(flopcast("predict", *step, "--batch", 64, "--explain", "--json")[1]) == found
    largest = json.loads(flopcast("predict", *step, "--largest-batch", "--json")[1])["largest_batch"]
    assert largest > 64
    out = flopcast("predict", *step, "--largest-batch")[1]  # with the results, on stdout
    assert f"largest micro-batch that fits │ {largest} samples" in " ".join(out.split())
    for batch, fits in ((largest, True), (largest + 1, False)):
        assert json.loads(flopcast("predict", *step, "--batch", batch, "--json")[1])["fits"] is fits


def test_explain_of_a_shipped_stream_loads_no_torch() -> None:
    script = (
        "import sys; from flopcast.roofline.cli.app import main; sys.argv = ['flopcast', 'explain', '--gpu', "
        "'nvidia-h200', '--width', '256', '--json']; main(); "
        "sys.exit(bool({'torch', 'pandas', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


def test_the_roofline_of_calls_is_told_and_drawn(flopcast: Run, tmp_path: Path) -> None:
    call = (
        "explain",
        *H200,
        "--width",
        "128",
        "--depth",
        "2",
        "--vocab",
        "512",
        "--phase",
        "decode",
        "--context",
        "64",
    )
    code, out, _ = flopcast(*call, "--out", tmp_path / "calls.png", "--json")
    calls = json.loads(out)["calls"]
    assert (code, calls["turning_batch"]) == (0, None)
    assert {"decode", "prefill"} == {one["phase"] for one in calls["calls"]}
    assert (tmp_path / "calls.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = flopcast(*call)
    assert code == 0
    assert "no batch makes a decode matrix-bound" in " ".join(out.split())
    code, _, err = flopcast(*STEP, "--out", tmp_path / "calls.png")
    assert (code, "--phase prefill or decode" in err) == (2, True)
