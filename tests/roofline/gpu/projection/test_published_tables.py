"""Published tables: read and refused by line, and a projection refined by them (made here by a known law, no one's)."""

import csv
import gzip
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopcast.errors import UsageError
from flopcast.roofline.base import csv_files
from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.library.profiles import PUBLISHED, find_profile, projection, published_record
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.projection.project import common_sigma
from flopcast.roofline.gpu.projection.published_fit import apply, estimates, refine, serving_estimate
from flopcast.roofline.gpu.projection.published_tables import Table, Timed, read_table, refusal
from flopcast.roofline.gpu.projection.rates import SIGMA
from flopcast.roofline.step.questions.kernel_times import KERNELS_IN, KERNELS_OUT, kernels
from flopcast.roofline.stream.lowering.variants import SurfaceKey

L4 = find_spec("nvidia-l4")
NT = SurfaceKey.parse("torch/gemm/nt/bf16/cold")


@pytest.fixture(scope="module")
def plain() -> Profile:
    return projection("nvidia-l4")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def gemm_row(m: int, n: int, k: int, ms: float = 10.0, **more: Any) -> dict[str, Any]:
    return {"gpu": "NVIDIA L4", "op": "linear", "dtype": "bf16", "m": m, "n": n, "k": k, "latency_ms": ms, **more}


def attention_row(seq: int, **more: Any) -> dict[str, Any]:
    return {
        "gpu": "NVIDIA L4", "op": "attention_prefill_causal", "kernel": "flash_attention", "dtype": "bf16", "batch": 2,
        "seqlen": seq, "q_heads": 16, "kv_heads": 4, "head_dim": 128, "latency_ms": 50.0, **more,
    }  # fmt: skip


def table(rows: list[dict[str, Any]], folder: Path, gpu: str = "nvidia-l4") -> Table:
    return read_table(write(folder / "table.csv", rows), find_spec(gpu))


# --- reading ------------------------------------------------------------------------------------------------


def test_products_and_attention_are_read_plain_and_gzipped(tmp_path: Path) -> None:
    for name in ("plain.csv", "packed.csv.gz"):
        (row,) = read_table(write(tmp_path / name, [gemm_row(129, 256, 512, 0.5)]), L4).rows
        assert (row.line, row.seconds, str(row.work.variant), row.work.flops) == (
            2,
            5e-4,
            "nt/bf16",
            2 * 129 * 256 * 512,
        )
    first, second = table([attention_row(512), attention_row(512, op="attention", direction="bwd")], tmp_path).rows
    assert (first.is_serving, str(first.work.variant)) == (True, "fwd/causal/bf16/d128")
    assert (second.is_serving, str(second.work.variant)) == (False, "bwd/causal/bf16/d128")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"m": "0"}, "m is 0: valid is an integer of at least 1"),
        ({"k": "1e3"}, "k is '1e3'"),
        ({"n": ""}, "n is ''"),
        ({"latency_ms": "-1"}, "latency_ms is '-1': valid is a positive number"),
        ({"latency_ms": "nan"}, "latency_ms is 'nan'"),
        ({"latency_ms": "0.001"}, "above the peak of 121; latencies are in milliseconds"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
        ({"op": "conv"}, "op is 'conv'"),
        ({"layout": "tt"}, "layout is 'tt'"),
        ({"gpu": "L4-ish"}, "gpu 'L4-ish' is not known"),
    ],
)
def test_wrong_rows_are_refused_by_their_line(changed: dict[str, str], reason: str, tmp_path: Path) -> None:
    good = gemm_row(512, 512, 512, layout="nt")
    found = table([good, {**good, **changed}, good], tmp_path)
    assert [row.line for row in found.rows] == [2, 4]
    ((line, said),) = found.refused
    assert line == 3
    assert reason in said
    assert "line 3" in refusal(Path("table.csv"), found)


def test_wrong_attention_is_refused_by_its_line(tmp_path: Path) -> None:
    found = table([attention_row(64), attention_row(64, kv_heads=5), attention_row(64, head_dim="x")], tmp_path)
    assert [line for line, _ in found.refused] == [3, 4]
    assert "q_heads 16 is not divisible by kv_heads 5" in found.refused[0][1]


def test_rows_of_other_gpus_are_left_out_not_taken_for_this_one(tmp_path: Path) -> None:
    rows = [gemm_row(64, 64, 64), gemm_row(64, 64, 64, gpu="NVIDIA L40S"), gemm_row(64, 64, 64, gpu="nvidia-l4")]
    found = table(rows, tmp_path)
    assert ([row.line for row in found.rows], found.others) == ([2, 4], 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("m,n,latency_ms\n1,1,1\n", "columns k are missing"),
        ("m,n,k,m,latency_ms\n1,1,1,1,1\n", "columns 'm' are named twice"),
        ("seqlen,latency_ms\n1,1\n", "batch, q_heads, kv_heads, head_dim are missing"),
    ],
)
def test_a_file_without_the_columns_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(UsageError, match=reason):
        read_table(tmp_path / "table.csv", L4)
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "none.csv", L4)
    (tmp_path / "broken.csv.gz").write_bytes(b"\x1f\x8b\x08broken")
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "broken.csv.gz", L4)


# --- refining -----------------------------------------------------------------------------------------------

SIZES = [(m, n, k) for m in (128, 513, 1024, 4096) for n in (256, 1024, 3072, 8192) for k in (64, 512, 2048, 8192)]


@pytest.fixture(scope="module")
def made(plain: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Times of a GPU like the projected L4 but with twice the launch floor, 0.8 of its inner loop, less power."""
    own = plain.surfaces[NT]
    changed = {name: own.params[name] * by for name, by in (("floor", 2.0), ("reach", 0.8), ("throttle", 0.7))}
    truth = replace(own, params={**own.params, **changed})
    rows = []
    for m, n, k in SIZES:
        logs = truth.law(np.log2([[m, n, k]]), np.array([2.0 * (m * k + n * k + m * n)]), np.array([2.0 * m * n * k]))
        rows.append(gemm_row(m, n, k, float(np.exp(logs[0])) * 1e3))
    return write(tmp_path_factory.mktemp("made") / "made.csv", rows)


def test_a_refined_profile_foretells_shapes_that_it_was_not_fitted_to(
    plain: Profile, made: Path, tmp_path: Path
) -> None:
    rows = read_table(made, L4).rows
    held = [row for row in rows if row.is_held_out]
    assert 0.25 < len(held) / len(rows) < 0.75
    refined, record = refine(plain, L4, rows, "a table", hold_out=True)
    actual = np.array([row.seconds for row in held])
    before, after = (np.abs(estimates(p, L4, held)[0] / actual - 1).mean() for p in (plain, refined))
    assert before > 0.12
    assert after < 0.03
    assert refined.basis == "published"
    assert refined.provenance["published"]["source"] == "a table"
    assert refined.provenance["published"]["rows"] == {str(NT): len(rows) - len(held)}
    assert record["held_out"]
    assert refined.ceilings["matrix_sustained/bf16"].basis == "published"
    refined.save(tmp_path / "l4.json.gz")
    assert Profile.load(tmp_path / "l4.json.gz") == refined
    asked = [(held[0].work, "torch", "cold")]
    assert refined.estimate(asked)[0].basis == "published"
    assert refined.estimate(asked)[0].sigma < plain.estimate(asked)[0].sigma
    assert common_sigma(refined, "gemm") < common_sigma(plain, "gemm")
    assert common_sigma(refined, "softmax") == SIGMA["memory"]


def test_other_layouts_move_along_and_stay_extrapolated(plain: Profile, made: Path) -> None:
    refined, _ = refine(plain, L4, read_table(made, L4).rows, "a table")
    for name in map(SurfaceKey.parse, ("torch/gemm/tn/bf16/cold", "torch/gemm/nn/bf16/hot")):
        ratio = refined.surfaces[name].params["floor"] / plain.surfaces[name].params["floor"]
        assert ratio == pytest.approx(2.0, rel=0.25)
    memory = SurfaceKey.parse("torch/pointwise/mul|fp32+fp32>fp32|a,a>a/cold")
    assert refined.surfaces[memory] == plain.surfaces[memory]
    assert "torch/gemm/tn/bf16/cold" not in refined.provenance["published"]["rows"]


def test_what_ships_is_remade_by_its_record(plain: Profile, made: Path) -> None:
    refined, record = refine(plain, L4, read_table(made, L4).rows, "a table")
    assert apply(plain, record) == refined
    # on another chip's profile only ratios move, and it stays a projection
    other = apply(projection("nvidia-l40s"), record)
    assert other.basis == "projected"


def test_a_servers_attention_is_told_apart_from_torchs(plain: Profile, tmp_path: Path) -> None:
    """Heads that share keys are packed: one query row of 16 heads costs a block, not 16; the stores come on top."""
    short = table([attention_row(1, latency_ms=1.0), attention_row(1, latency_ms=1.0, kv_heads=16)], tmp_path).rows
    seconds, _ = serving_estimate(plain, L4, short)
    many = table([attention_row(1, latency_ms=9.0, batch=256, kv_heads=k) for k in (1, 16)], tmp_path).rows
    packed, apart = serving_estimate(plain, L4, many)[0]
    assert packed < 0.5 * apart
    assert seconds.min() > plain.ceiling("kernel_floor", 0.0) * 3  # three kernels


def test_too_few_rows_and_measured_profiles_are_refused(plain: Profile, tmp_path: Path) -> None:
    few: tuple[Timed, ...] = table([gemm_row(512, 512, 512)] * 3, tmp_path).rows
    with pytest.raises(UsageError, match="3 of torch/gemm/nt/bf16/cold: a fit needs 20 rows"):
        refine(plain, L4, few, "a table")
    with pytest.raises(UsageError, match=r"nvidia-h200 is measured"):
        refine(find_profile("nvidia-h200"), find_spec("nvidia-h200"), few, "a table")


# --- the command and what ships -----------------------------------------------------------------------------


def test_import_makes_a_profile_that_predicts(flopcast: Callable[..., Any], made: Path, tmp_path: Path) -> None:
    out = tmp_path / "l4.json"
    options = "--gpu", "nvidia-l4", "--source", "a page", "--out", out
    result = flopcast("import", made, *options, "--hold-out", "--json")
    assert result.code == 0
    found = result.document
    assert (found["basis"], found["source"], found["rows"]) == ("published", "a page", len(SIZES))
    (check,) = found["errors"]
    assert check["after"] < check["before"]
    command = "predict", "--gpu", out, "--config", "qwen3-0.6b", "--batch", 4, "--seq", 256, "--json"
    assert flopcast(*command).document["profile_basis"] == "published"


def test_import_refuses_with_lines_and_what_to_do(flopcast: Callable[..., Any], made: Path, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.csv", [gemm_row(512, 512, 512), gemm_row(0, 512, 512)])
    result = flopcast("import", bad, "--gpu", "nvidia-l4", "--source", "a page")
    assert result.code == 2
    assert "line 3: m is 0" in result.err
    assert "--skip-refused" in result.err
    result = flopcast("import", made, "--gpu", "nvidia-l4")
    assert result.code == 2
    assert "--source is missing" in result.err
    result = flopcast("import", made, "--gpu", "nvidia-l40s", "--source", "a page")
    assert result.code == 2
    assert "none of its 64 rows is of nvidia-l40s" in result.err


def test_what_ships_of_published_times_is_parameters_with_a_source(plain: Profile) -> None:
    for name in ("nvidia-a100-80gb-sxm", "nvidia-l40s"):
        profile, record = find_profile(name), published_record(name)
        assert record is not None
        assert profile.basis == "published"
        assert "aiconfigurator" in profile.provenance["published"]["source"]
        assert record["held_out"]
        assert (PUBLISHED / f"{name}.json").stat().st_size < 4096  # parameters, never tables
        assert profile.surfaces[NT].params["reach"] != projection(name).surfaces[NT].params["reach"]
    board = find_profile("nvidia-a100-40gb-sxm")  # the same chip
    assert board.basis == "projected"
    assert board.provenance["published"]["gpu"] == "nvidia-a100-80gb-sxm"
    assert published_record("nvidia-l4") is None
    assert plain.basis == "projected"


def test_the_table_that_kernels_writes_is_read_once_it_holds_measured_times(tmp_path: Path) -> None:
    asked = [
        {"op": "gemm", "m": "1024", "n": "1024", "k": "2048", "layout": "tn", "dtype": "bf16", "backend": "torch"},
        {"op": "attention", "batch": "4", "heads": "16", "kv_heads": "8", "seq": "1024", "head_dim": "128",
         "causal": "true", "direction": "fwd", "dtype": "bf16", "backend": "sdpa"},
    ]  # fmt: skip
    columns = [*KERNELS_IN, *KERNELS_OUT]
    rows = [{**dict.fromkeys(columns, ""), **row} for row in asked]
    out = tmp_path / "times.csv"
    csv_files.write_rows(out, columns, kernels(rows, find_profile("nvidia-l4")))
    refused = read_table(out, L4)
    assert [line for line, _ in refused.refused] == [2, 3]
    assert "a forecast of `flopcast kernels`: write the measured time" in refusal(out, refused)
    _, forecast = csv_files.read_rows(out)
    measured = [{**row, "seconds": f"{1.07 * float(row['seconds']):.7g}"} for row in forecast]
    found = read_table(write(tmp_path / "measured.csv", measured), L4)
    assert (found.refused, len(found.rows)) == ((), 2)
    plain = [{"m": "1024", "n": "1024", "k": "2048", "layout": "tn", "latency_ms": 1e3 * float(measured[0]["seconds"])}]
    (same,) = read_table(write(tmp_path / "plain.csv", plain), L4).rows
    assert found.rows[0].work.shape == same.work.shape
    assert found.rows[0].seconds == pytest.approx(same.seconds)
    for change, said in (
        ({"backend": "triton"}, "valid are times of the library"), ({"cache": "hot"}, "with cold operands"),
        ({"seconds": "1e-9"}, "seconds is 1e-9: .* above the peak"), ({"seconds": ""}, "a positive number of seconds"),
    ):  # fmt: skip
        bad = read_table(write(tmp_path / "bad.csv", [{**measured[0], **change}]), L4)
        assert re.search(said, refusal(tmp_path / "bad.csv", bad))
