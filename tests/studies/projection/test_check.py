"""What checks of projections rest on: published rows read as what torch runs, figures that are what rows say."""

import csv
from pathlib import Path

import numpy as np
import pytest

from flopcast.kernels.shapes import Attention, Gemm
from flopcast.roofline.stream.lowering.describe import describe
from studies.projection import check
from studies.projection import steps as projection_steps
from studies.projection.check import Checked, pointwise_call
from studies.projection.report import page
from studies.projection.targets import TARGETS


@pytest.mark.parametrize(
    ("op", "variant", "tensors"),
    [
        ("add", "add|fp32+fp32>fp32|a,a>a", 3),
        ("mulu", "mul|fp32>fp32|a>a", 2),
        ("pow", "pow|fp32+fp32>fp32|a,a>a", 3),
        ("powu", "pow|fp32>fp32|a>a", 2),
        ("gelu", "gelu|fp32>fp32|a>a", 2),
        ("softmax", "_softmax|fp32>fp32", 2),
    ],
)
def test_rows_of_the_element_wise_table_are_torchs_calls(op: str, variant: str, tensors: int) -> None:
    work = describe(pointwise_call(op, 2048, 512))
    assert str(work.variant) == variant
    assert work.bytes == tensors * 4 * 2048 * 512
    norm = describe(pointwise_call("ln", 2048, 512))
    assert norm.op_class == "reduction" or "layer_norm" in str(norm.variant)


def test_layouts_named_by_columns_are_ours_named_by_rows() -> None:
    """cuBLAS's TN, of y = x W^T, reads rows of k in both operands: nt here. Heads of unequal sizes are left out."""
    row = {"op": "matmul", "m": "4096", "n": "1536", "k": "5120", "layout": "TN"}
    for named, ours in (("TN", "nt"), ("NN", "nn"), ("NT", "tn")):
        shape = check._training_shape({**row, "layout": named})
        assert isinstance(shape, Gemm)
        assert (shape.m, shape.n, shape.k, shape.layout) == (4096, 1536, 5120, ours)
    heads = {
        "batch": "1",
        "seq_len": "4096",
        "head_num": "32",
        "kv_head_num": "8",
        "qk_head_dim": "128",
        "v_head_dim": "128",
    }
    shape = check._training_shape({"op": "sdp_bwd", **heads})
    assert isinstance(shape, Attention)
    assert (shape.direction, shape.kv_heads, shape.causal) == ("bwd", 8, True)
    assert check._training_shape({"op": "sdp_fwd", **heads, "qk_head_dim": "192"}) is None


def test_a_check_says_how_far_rows_are_off_and_how_many_its_interval_holds() -> None:
    logs = np.log(np.array([1.1, 0.9, 1.3, 1.0]))
    checked = Checked("nvidia-a100-80gb-sxm", "matmul", "refined", "", logs, np.full(4, 0.1), {"k": [64, 64, 128, 128]})
    row = checked.row()
    assert row["mean_abs_error"] == pytest.approx(0.125)
    assert row["coverage90"] == 0.75  # 1.3 is 2.6 deviations off
    assert (row["target"], row["met"]) == (0.07, False)
    assert [(s["value"], s["rows"]) for s in checked.by_size()] == [(64, 2), (128, 2)]
    assert "**missed**" in page([row], checked.by_size(), [])


def test_a_published_step_is_micro_batches_and_one_gpus_share_of_the_optimizer() -> None:
    """The committed rows: no target is said to be met that their own errors do not meet."""
    folder = Path(__file__).resolve().parents[3] / "reports" / "projection"
    steps = projection_steps.read(folder / "steps.csv")
    assert {(s["gpu"], s["stage"]) for s in steps} >= {("nvidia-a100-80gb-sxm", "zero-shot")}
    for step in steps:
        assert step["error"] == pytest.approx(step["forecast"] / step["seconds"] - 1, abs=1e-5)
        assert step["error_torch_flash"] < step["error"]
    with (folder / "checks.csv").open(newline="") as file:
        rows = {(r["gpu"], r["class"], r["stage"]): r for r in csv.DictReader(file)}
    for key, target in TARGETS.items():
        assert rows[key]["met"] == ("true" if float(rows[key]["mean_abs_error"]) <= target else "false")
        assert float(rows[key]["coverage90"]) > 0.85
