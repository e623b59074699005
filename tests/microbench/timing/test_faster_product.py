"""Products that both backends are timed at when a shape first comes up."""

from __future__ import annotations

import pytest
import torch

import flopcast
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.timing.faster_product import measured_choice, operands_of, ways

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def otherwise(shape: Gemm) -> str:
    """An answer that no timing gives."""
    return "otherwise"


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_cublas_multiplies_operands_as_they_are_stored(layout: str) -> None:
    shape = Gemm(m=5, n=3, k=7, dtype="fp32", layout=layout)
    a, b, out = operands_of(shape, torch.device("cpu"))
    ways(shape)["torch"]((a, b, out))()
    torch.testing.assert_close(out, (a if layout[0] == "n" else a.T) @ (b if layout[1] == "n" else b.T))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here products can be timed")
def test_the_profile_chooses_where_there_is_no_gpu() -> None:
    assert measured_choice(otherwise)(Gemm(m=1024, n=1024, k=1024)) == "otherwise"


@pytest.mark.gpu
@needs_cuda
def test_the_faster_one_is_timed_unless_a_graph_is_captured() -> None:
    choose = measured_choice(otherwise)
    product = Gemm(m=1024, n=1024, k=1024, layout="nt")
    assert choose(product) in ("torch", "triton")
    assert choose(Gemm(m=64, n=64, k=64, dtype="fp32")) == "otherwise"  # which the Triton kernels are not tuned for
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        assert choose(Gemm(m=1024, n=2048, k=1024)) == "otherwise"
    graph.replay()
    assert x.sum() == 8


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("mode", ["", "default", "reduce-overhead"])
def test_a_patched_model_trains_as_before(mode: str) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128, vocab_size=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).cuda()
    tokens = torch.randint(0, 1024, (2, 256), device="cuda")

    def losses() -> list[float]:
        step = torch.compile(model, mode=mode) if mode else model
        found = []
        for _ in range(4):
            with torch.autocast("cuda", torch.bfloat16):
                loss = step(input_ids=tokens, labels=tokens).loss
            loss.backward()
            model.zero_grad(set_to_none=True)
            found.append(loss.item())
        return found

    plain = losses()
    torch.compiler.reset()
    flopcast.patch(model, matmul="measured")
    assert losses() == pytest.approx(plain, rel=5e-3)
    torch.compiler.reset()
