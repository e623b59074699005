"""The page a person reads: whole without the network, every validation row on it, and without what is missing."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Attention, Call, Gemm, Operand, Shape, shape_from_json, shape_to_json
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.dollars.points import CostCurve, StepPoint, cost_curve
from flopcast.roofline.dollars.standard import standard_gpu
from flopcast.roofline.gpu.catalogue.prices import latest, load_prices
from flopcast.roofline.gpu.fit.quality import FitReport, Quality
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast, width_of
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.lowering.classes import GROUPS
from flopcast.roofline.stream.model.models import Config, ladder, make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.validation.compare_steps import compare
from flopcast.roofline.validation.step_comparison import StepComparison
from flopcast.roofline.views.figures.canvas import apart
from flopcast.roofline.views.page.data import ReportData
from flopcast.roofline.views.page.page import render
from flopcast.roofline.views.page.provenance import provenance
from flopcast.roofline.views.page.words import how_wrong, who_leads

WIDTHS = (256, 1024)  # their op streams are shipped


def measurement(shape: Shape, seconds: float, cache: str = "cold", **fields: Any) -> dict[str, Any]:
    return {"key": shape.key, "backend": "torch", "cache": cache, "shape": shape_to_json(shape), "status": "ok",
            "seconds": seconds, "kernel_seconds": seconds, "throttled": False, **fields}  # fmt: skip


def measurements() -> list[dict[str, Any]]:
    rows = [measurement(Gemm(m=n, n=n, k=n, layout=layout), 2e-6 + 2 * n**3 / 6e14)
            for n in (256, 1024, 4096) for layout in ("nt", "nn", "tn")]  # fmt: skip
    rows += [measurement(Attention(batch=4, heads=8, kv_heads=4, seq=s, head_dim=128, direction=d), 1e-5 * s / 256,
                         backend="sdpa-cudnn") for s in (256, 1024) for d in ("fwd", "bwd")]  # fmt: skip
    for size in (1, 64, 4096):
        operand = Operand((size, 1024), (1024, 1), "fp32")
        call = Call("aten.mul.Tensor", (operand, operand), (operand,), '[{"t":0},{"t":1}]')
        rows += [measurement(call, 2e-6 + call.bytes / 4e12), measurement(call, 2e-6 + call.bytes / 6e12, "hot")]
    rows.append({**measurement(Gemm(m=8, n=8, k=8), 1.0), "status": "oom", "seconds": None, "kernel_seconds": None})
    return rows


def step_rows(
    config: Config, name: str, seconds: float | None, device: float, *, batch: int = 4
) -> list[dict[str, Any]]:
    """The rows of a step and of its kernels, as `run_steps` writes them; without seconds, of one that ran out of
    memory."""
    plan = {"name": name, "config": config, "batch": batch, "seq": 256, "precision": "autocast-bf16",
            "optimizer": "adamw", "attention": "sdpa", "group": "ladder"}  # fmt: skip
    ops = {"aten::mm": [device / 4, 10], "aten::_foreach_add_": [device / 2, 3], "aten::mul": [device / 4, 9]}
    told = {"plan": plan, "status": "ok" if seconds else "oom",
            "reason": None if seconds else "CUDA out of memory <of course>"}  # fmt: skip
    step = {"key": f"step/{name}", **told, "value": seconds, "host_seconds": 0.014, "peak_bytes": 2.6e9}
    kernels = {"key": f"step_kernels/{name}", **told, "device_seconds": device, "n_kernels": 864, "ops": ops}
    return [step, kernels]


@pytest.fixture(scope="module")
def profile() -> Profile:
    """An H200 with nothing measured but its ceilings: every kernel costs a floor, bytes or FLOPs."""
    values = {
        "matrix_burst/bf16": 7.9e14, "matrix_sustained/bf16": 6.6e14, "hbm_copy": 4e12, "l2_copy": 6e12,
        "copy/1048576": 8e11, "copy/33554432": 5.8e12, "kernel_floor": 1.1e-6, "kernel_gap": 1e-6,
        "launch": 5.8e-6, "sync": 8e-6, "queue_depth": 1021.0,
    }  # fmt: skip
    phase = {"launch": 1.1e-5, "view": 4e-6, "fixed": 8e-4}
    return Profile(
        gpu="nvidia-h200", basis="measured",
        device={"type": "cuda", "name": "NVIDIA H200", "sm_count": 132, "memory_bytes": 150 * 10**9,
                "l2_bytes": 60 * 1024**2, "capability": [9, 0], "power_limit_w": 700.0},
        peaks={dtype: Number(value, value, value, "datasheet", "its maker")
               for dtype, value in {"bf16": 9.9e14, "fp16": 9.9e14, "tf32": 4.9e14, "fp32": 6.7e13}.items()},
        ceilings={name: Number(v, v * 0.99, v * 1.01, "measured", f"scalar/{name}") for name, v in values.items()},
        surfaces={},
        host=HostCosts("a host", phase, phase, {"launch": 6e-6, "fixed": 3e-4}, 1e-4, 0.1, "measured"),
        stack={"torch": "2.11.0"}, aliases={"sdpa": "sdpa-cudnn"},
        provenance={"from": "2026-11-21T03:44:54Z", "to": "2026-11-21T03:46:38Z", "suites": ["quick"], "rows": 9},
    )  # fmt: skip


@pytest.fixture(scope="module")
def anatomy(profile: Profile) -> list[Forecast]:
    return [forecast(config, Run(), profile) for config in ladder(WIDTHS)]


@pytest.fixture(scope="module")
def curves(anatomy: list[Forecast]) -> list[CostCurve]:
    """The second GPU is half as fast, so that the curves have an order; its largest model does not fit."""
    book = load_prices()
    made = []
    for gpu, slower, basis in (("nvidia-h200", 1.0, "measured"), ("nvidia-l4", 2.0, "projected")):
        points = [
            StepPoint(
                n_params=f.n_params, width=width_of(f), depth=f.depth, step_seconds=f.step_seconds * slower,
                low=f.step_seconds_low * slower, high=f.step_seconds_high * slower,
                flops_counted=f.flops_counted, tokens=1024, fits=slower == 1.0 or i == 0,
            )
            for i, f in enumerate(anatomy)
        ]  # fmt: skip
        price = latest(book, gpu)
        assert price is not None
        made.append(cost_curve(gpu, points, price, basis))
    return made


@pytest.fixture(scope="module")
def validation(profile: Profile, anatomy: list[Forecast]) -> list[StepComparison]:
    small, large = ladder(WIDTHS)
    return compare(
        [
            *step_rows(small, "narrow", anatomy[0].step_seconds * 1.04, anatomy[0].device_seconds * 1.02),
            *step_rows(large, "wide", anatomy[1].step_seconds / 1.5, anatomy[1].device_seconds / 9),
            *step_rows(make_config(width=1024, depth=5), "too-large", None, 0.0),
        ],
        profile,
    )


@pytest.fixture(scope="module")
def data(
    profile: Profile, anatomy: list[Forecast], curves: list[CostCurve], validation: list[StepComparison]
) -> ReportData:
    quality = Quality("torch/gemm/cold", 9, 2, 0.03, 0.1, 0.04, None, 1.0)
    fit = FitReport([], [quality], 9, 2, 0, unused={"oom": 1}, warnings=["one row is odd"])
    return ReportData(profile, fit, measurements(), validation, anatomy, curves, notes=("Measured in a cellar.",))


@pytest.fixture(scope="module")
def page(data: ReportData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render(data, tmp_path_factory.mktemp("report") / "deep" / "folder")


class Page(HTMLParser):
    """Tags with attributes, and the texts of the cells of each table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self._rows = self.tables.setdefault(str(dict(attrs)["data-name"]), [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self._rows[-1][-1] += data


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_it_begins_with_what_standard_models_cost_and_folds_the_rest(data: ReportData, tmp_path: Path) -> None:
    h200 = find_profile("nvidia-h200")
    found = standard_gpu(h200, latest(load_prices(), h200.gpu))
    page = read(render(replace(data, standard=found), tmp_path))
    details = [attributes for tag, attributes in page.tags if tag == "details"]
    assert details[0]["id"] == "table-standard"
    assert [each["id"] for each in details if "open" in each] == ["table-standard", "table-summary", "table-leaders"]
    assert [row[0] for row in page.tables["standard"][1:]] == ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"]


def test_the_page_loads_nothing_from_anywhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tags = read(page).tags
    links = [attrs[name] for _, attrs in tags for name in ("src", "href", "srcset", "data") if attrs.get(name)]
    assert links
    assert all(str(link).startswith(("#", "data:")) for link in links)
    assert not re.search(r"url\((?!#)|@import|https?://", text)
    assert not [tag for tag, _ in tags if tag in ("iframe", "object", "embed")]
    assert not [tag for tag, attrs in tags if tag == "script" and attrs]


def test_every_figure_says_what_it_shows_and_lies_beside_the_page_as_png(page: Path) -> None:
    figures = [attrs for tag, attrs in read(page).tags if tag in ("svg", "img")]
    assert len(figures) == 7
    assert all(len(attrs.get("aria-label") or attrs.get("alt") or "") > 40 for attrs in figures)
    assert all(attrs.get("role") == "img" for attrs in figures)
    pngs = sorted(path.name for path in (page.parent / "figures").iterdir())
    assert pngs == [
        "agreement.png",
        "anatomy.png",
        "bandwidth.png",
        "cost.png",
        "memory.png",
        "residuals.png",
        "roofline.png",
    ]
    assert all((page.parent / "figures" / name).read_bytes().startswith(b"\x89PNG") for name in pngs)


def test_ids_are_unique(page: Path) -> None:
    ids = [attrs["id"] for _, attrs in read(page).tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def measured_groups(rows: list[StepComparison]) -> tuple[str, ...]:
    """Eager steps have no generated kernels: the page shows no column for them."""
    found = tuple(group for group in GROUPS if any(row.classes[group].measured for row in rows))
    assert "gemm" in found
    assert "generated" not in found
    return found


def test_every_validation_row_appears_with_every_error(page: Path, validation: list[StepComparison]) -> None:
    tables = read(page).tables
    for name, errors in (
        ("validation", ("step", "device", "host", "peak")),
        ("components", measured_groups(validation)),
    ):
        _, *rows = tables[name]
        assert len(rows) == len(validation) == 3
        for row, cells in zip(validation, rows, strict=True):
            assert cells[0].startswith(row.plan.name)
            for error in errors:
                value = row.parts[error].error
                assert value is None or f"{value:+,.1%}" in cells
    assert "CUDA out of memory <of course>" in tables["validation"][3]


def test_every_ceiling_price_and_pair_appears_with_its_basis(page: Path, data: ReportData) -> None:
    tables = read(page).tables
    assert len(tables["ceilings"]) > len(data.profile.ceilings)
    assert {"measured", "datasheet"} <= {cell for row in tables["ceilings"] for cell in row}
    assert [row[0] for row in tables["ladder"][1:]] == ["256", "1024"]
    text = page.read_text(encoding="utf-8")
    for curve in data.curves:
        row = next(row for row in tables["prices"] if row[0] == curve.gpu)
        assert curve.price.date.isoformat() in row
        assert curve.price.provider in row
        assert curve.basis in row
        assert f"{curve.gpu} {curve.basis}" in text
    assert any("out of memory" in cell for row in tables["costs"] for cell in row)
    assert "Measured in a cellar." in text
    assert "one row is odd" in text


def test_the_summary_tells_the_worst_forecast_with_its_sign(page: Path, validation: list[StepComparison]) -> None:
    text = page.read_text(encoding="utf-8")
    sentence = how_wrong(validation)
    assert "worst +50.0% (wide 4x256 adamw)" in sentence
    assert "median signed +23.1%" in sentence
    assert "1 of 3 steps could not be compared" in sentence
    assert sentence in text
    assert "$/Mtoken" in text
    assert "/Mtoken at $" in text


def test_a_gpu_alone_leads_nothing(curves: list[CostCurve]) -> None:
    said = who_leads(curves)
    assert "nvidia-l4 (projected) at 42M parameters" in said  # the only other model does not fit there
    assert "nvidia-h200 (measured) at 219M parameters" in said  # which does not fit an L4
    assert "no other GPU is compared" in who_leads(curves[:1])
    assert "Most for the money" not in who_leads(curves[:1])


def test_points_have_hover_texts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = [row for row in measurements() if row["status"] == "ok" and row["cache"] == "cold"]
    gemms = [row for row in shown if row["shape"]["kind"] == "gemm"]
    told = re.findall(r'data-head="([^"]*)" data-tips="([^"]*)"', text)
    words = [head + word for head, all_words in told for word in re.split(r"\||; ", all_words)]
    shapes = [shape_from_json(row["shape"]) for row in gemms]
    rates = [shape.flops / row["seconds"] for shape, row in zip(shapes, gemms, strict=True)]
    seen = apart([shape.flops / shape.bytes for shape in shapes], rates)  # one of those that lie under one another
    assert sum(word.startswith("matrix products, ") for word in words) == len(seen) > 1
    assert "wide 4x256 adamw: measured" in text


def test_the_same_data_give_the_same_page(data: ReportData, page: Path, tmp_path: Path) -> None:
    assert render(data, tmp_path).read_bytes() == page.read_bytes()


def test_what_is_missing_is_left_out(profile: Profile, tmp_path: Path) -> None:
    bare = replace(profile, host=None, ceilings={}, provenance={}, stack={}, aliases={})
    found = read(render(ReportData(bare), tmp_path))
    assert set(found.tables) == {"ceilings"}  # the datasheet's
    assert not [tag for tag, _ in found.tags if tag == "svg"]
    assert "FLOPs per dollar" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_processor_without_datasheet_curves_or_fit(profile: Profile, tmp_path: Path) -> None:
    ceilings = {name: number for name, number in profile.ceilings.items() if not name.startswith("copy/")}
    cpu = replace(
        profile, gpu="cpu", device={"type": "cpu", "name": "Some processor", "sm_count": 2}, ceilings=ceilings,
        peaks={"fp32": replace(profile.peaks["fp32"], basis="measured")},
    )  # fmt: skip
    found = read(render(ReportData(cpu, measurements=measurements()), tmp_path))
    assert len([tag for tag, _ in found.tags if tag == "svg"]) == 2
    assert "prices" not in found.tables
    assert "Some processor, 2 cores" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_projected_profile_says_so(profile: Profile, tmp_path: Path) -> None:
    page = render(ReportData(replace(profile, basis="projected")), tmp_path)
    assert "not measured, projected from its datasheet" in page.read_text(encoding="utf-8")


def test_names_from_files_cannot_break_the_page(profile: Profile, tmp_path: Path) -> None:
    odd = replace(profile, device={**profile.device, "name": "<script>alert(1)</script>"})
    assert "<script>alert" not in render(ReportData(odd), tmp_path).read_text(encoding="utf-8")


def test_an_unwritable_folder_is_a_usage_error(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="--out"):
        render(ReportData(profile), tmp_path / "file")


PROBE = """
const table = document.querySelector('table[data-name="validation"]');
const column = [...table.tHead.rows[0].cells].findIndex((th) => th.dataset.key === "step_error");
const button = table.tHead.rows[0].cells[column].querySelector("button");
const order = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent.split(" ")[0]);
const found = { errors: window.faults, before: order() };
button.click(); found.up = order();
button.click(); found.down = order();
let blob;
URL.createObjectURL = (given) => { blob = given; return "#"; };
document.querySelector('button.csv[data-table="validation"]').click();
found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
blob.text().then((text) => { found.csv = text; document.title = "PROBE" + JSON.stringify(found); });
"""


def test_in_a_browser_it_sorts_downloads_and_logs_nothing(page: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine (Debian's package: chromium)")
    text = page.read_text(encoding="utf-8")
    catch = "<script>window.faults = []; addEventListener('error', (e) => faults.push(e.message));</script>"
    probed = tmp_path / "probed.html"
    probed.write_text(
        text.replace("<style>", catch + "<style>", 1).replace("</body>", f"<script>{PROBE}</script></body>")
    )
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=390,800",
         f"--user-data-dir={tmp_path / 'browser'}", "--enable-logging=stderr", "--virtual-time-budget=4000",
         "--dump-dom", probed.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>PROBE(.*?)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    found = json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert found["errors"] == []
    assert found["before"] == ["narrow", "wide", "too-large"]
    assert found["up"] == ["narrow", "wide", "too-large"]
    assert found["down"] == ["wide", "narrow", "too-large"]  # what is missing stays last
    assert found["overflow"] <= 0  # a phone scrolls tables and figures, never the page
    rows = list(csv.DictReader(io.StringIO(found["csv"])))
    assert [row["status"] for row in rows] == ["ok", "ok", "oom"]
    assert float(rows[0]["step_error"]) == pytest.approx(0.5, abs=1e-4)


def test_a_card_of_few_rows_has_no_factor(profile: Profile) -> None:
    cards = {"gpu0": {"factor": 1.0, "rows": 9000}, "gpu1": {"factor": None, "rows": 12}}
    measured = replace(profile, provenance={**profile.provenance, "gpus": {"cards": cards, "classes": {}}})
    said = dict(provenance(ReportData(measured)))["cards"]
    assert "gpu0 (1.000 of the median card's time), gpu1 (few rows)" in said
