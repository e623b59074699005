"""A compiled step's code is a GPU's, though there is none: real dynamo and inductor in a process of their own.

A process for each step (`output_code`) where that is what is tested, or the GPU is another; else the one of all files.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.stream.compiled.compare import compare
from flopcast.roofline.stream.compiled.launches import GENERATED, Kind
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.tracer.compiler.apart import output_code
from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode

pytest.importorskip("triton")

Compiled = Callable[[Asked], Future[OutputCode]]

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
# attention without a mask, a product of odd width, and a line that dynamo cannot compile
USERS = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(256, 768)
        self.out = nn.Linear(256, 30_001)

    def forward(self, x):
        q, k, v = self.qkv(x).view(4, 512, 3, 4, 64).permute(2, 0, 3, 1, 4)
        x = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(4, 512, 256)
        {breaks}
        return self.out(x).float().logsumexp(-1).mean()

def net():
    return Net(), torch.randn(4, 512, 256)
"""


@pytest.fixture(scope="module")
def qwen3() -> OutputCode:
    return output_code(Asked(config=QWEN3, batch=4, seq=256))


def test_a_step_is_compiled_for_the_gpu(qwen3: OutputCode) -> None:
    forward, backward = read_output_code(qwen3.text)
    assert [graph.is_backward for graph in (forward, backward)] == [False, True]
    assert (qwen3.captured, qwen3.breaks, qwen3.waits, qwen3.calls) == (1, (), (), (0, 1))
    kinds = [Counter(launch.kind for launch in graph.launches) for graph in (forward, backward)]
    # per layer 7 products, and the logits'; the backward has two of each; the rotary angles may be a product too
    assert kinds[0][Kind.PRODUCT] - 15 in (0, 1)
    assert kinds[1][Kind.PRODUCT] == 30
    assert (kinds[0][Kind.ATTENTION], kinds[1][Kind.ATTENTION_BACKWARD]) == (2, 2)
    assert all(sum(count[kind] for kind in GENERATED) > 20 for count in kinds)
    assert "aten._scaled_dot_product_cudnn_attention.default" in qwen3.text
    assert "multi_processor_count=132, cc=90" in qwen3.text


def test_a_process_that_compiles_several_gives_the_code_of_each(qwen3: OutputCode, compiled: Compiled) -> None:
    """Nothing of a step is left for the next one."""
    asked = Asked(config=QWEN3, batch=4, seq=256)
    other = replace(asked, config={**QWEN3, "hidden_size": 192, "num_hidden_layers": 1}, mode="compile-graphs")
    token = replace(other, batch=2, seq=1, phase="decode", context=32, precision="bf16")
    refused, first, decode, found = [
        compiled(one) for one in (replace(asked, module="no:such", config=None), other, token, asked)
    ]
    with pytest.raises(UsageError, match="'no:such'"):
        refused.result()
    assert read_output_code(found.result().text) == read_output_code(qwen3.text)
    assert replace(found.result(), graphs=()) == replace(qwen3, graphs=())
    assert len(first.result().text) < len(qwen3.text)
    called = decode.result()
    ((graph,), (captured,)) = read_output_code(called.text), read_output_code(called.text)[0].captured
    assert (called.breaks, called.waits, called.outside) == ((), (), {})
    assert (graph.label, captured) == ("0_inference", (0, len(graph.launches)))
    assert sum(launch.kind is Kind.PRODUCT for launch in graph.launches) == 8, "of a layer, and the logits"


def test_products_have_operands_in_bf16_on_the_gpu(qwen3: OutputCode) -> None:
    products = [
        launch for graph in read_output_code(qwen3.text) for launch in graph.launches if launch.kind is Kind.PRODUCT
    ]
    head = [p for p in products if any(1000 in operand.shape for operand in p.operands)]
    assert len(head) >= 2
    assert {operand.dtype for product in head for operand in product.operands} == {"bf16"}
    assert "device='cpu'" not in qwen3.text


@pytest.fixture
def users(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(USERS.replace("{breaks}", "print(x.mean().item())"))
    return path


def test_choices_are_those_of_the_gpu_asked_for(users: Path) -> None:
    spec = find_spec("nvidia-a100-80gb-sxm")
    gpu = {"name": spec.name_match[0], "capability": spec.capability, "sm_count": spec.sm_count}
    code = output_code(Asked(module=f"{users}:net", gpu=gpu))
    assert "_scaled_dot_product_flash_attention" in code.text
    assert f"multi_processor_count={spec.sm_count}, cc=80" in code.text
    # a width that tensor cores do not read is padded to one that they do
    assert any(
        30_008 in operand.shape for graph in read_output_code(code.text) for launch in graph.launches
        for operand in launch.operands
    )  # fmt: skip
    # and where dynamo stops is told, and where the host waits
    assert code.captured == 2
    assert len(code.graphs) == 4
    assert code.calls == (0, 1, 2, 3)
    assert any(f"{users}:15" in found.where and "x.mean().item()" in found.where for found in code.breaks)
    assert code.waited_after == (1,)  # between the two forward graphs
    assert len(code.waits) == 1
    assert "net.py:15, in forward" in code.waits[0]


def test_a_recorded_step_launches_what_it_launched_on_an_h200(root: Path, compiled: Compiled) -> None:
    recorded = root / "reports" / "nvidia-h200" / "compiled-steps" / "mlp.code.gz"  # by torch 2.11
    code = compiled(Asked(module="flopcast.microbench.zoo:mlp", sizes={"batch": 4096})).result()
    expected = read_output_code(gzip.decompress(recorded.read_bytes()).decode())
    assert compare(expected, read_output_code(code.text)).within(0.02)


def test_what_layers_recompute_is_in_the_backward(compiled: Compiled) -> None:
    code = compiled(Asked(config=QWEN3 | {"num_hidden_layers": 1}, batch=2, checkpoint="full")).result()
    _, backward = code.graphs
    assert "_scaled_dot_product_cudnn_attention.default" in backward
    assert "_scaled_dot_product_cudnn_attention_backward.default" in backward
    assert "graphsafe_run_with_rng_state" in code.text  # what is launched is the operator that it is given
    graphs = read_output_code(code.text)
    attention = [launch for graph in graphs for launch in graph.launches if launch.kind == Kind.ATTENTION]
    assert [launch.name for launch in attention] == 2 * ["aten._scaled_dot_product_cudnn_attention"]
    assert len(attention[0].operands[0].shape) == 4  # a query of batch, heads, tokens and columns


def test_a_number_made_on_the_gpu_is_compiled(users: Path, compiled: Compiled) -> None:
    """As masks of attention make: tracing computes it, and there is no GPU to do so."""
    made = "x = torch.where(x > 0, x, torch.tensor(0.3125, device=x.device))"
    users.write_text(USERS.replace("{breaks}", made))
    code = compiled(Asked(module=f"{users}:net")).result()
    assert code.breaks == ()
    assert code.captured == 1
    assert "0.3125, tl.float32" in code.text  # with its value, within a kernel


def test_what_cannot_be_compiled_is_refused(users: Path, compiled: Compiled) -> None:
    with pytest.raises(UsageError, match="valid are compile, compile-graphs"):
        output_code(Asked(config=QWEN3, mode="fastest"))
    users.write_text(USERS.replace("{breaks}", "x = x @ x"))
    with pytest.raises(UsageError, match="torch cannot compile the step"):
        compiled(Asked(module=f"{users}:net")).result()
    drops = users.with_name("drops.py")
    drops.write_text(USERS.replace("{breaks}", "x = x if torch.rand([], device='cpu') < 0.5 else 2 * x"))
    with pytest.raises(
        UsageError, match=r"on the processor that is not known.*: .*drops\.py:15, in forward.*mode eager"
    ):
        compiled(Asked(module=f"{drops}:net")).result()
    with pytest.raises(UsageError, match=r"cannot compile the step: ValueError: .*qwen7"):
        compiled(Asked(config={"model_type": "qwen7", "vocab_size": 10})).result()
    with pytest.raises(UsageError, match=r"not compiled after 0\.1 s"):
        output_code(Asked(config=QWEN3), max_seconds=0.1)
