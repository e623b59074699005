"""A Qwen3 on all kernels by one call, in Triton's interpreter, on the CPU; test_patch.py runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flopcast.kernels import patch as P
from flopcast.kernels.attention_transformers import is_causal_mask, transformers_attention
from flopcast.kernels.shapes import Gemm

transformers = pytest.importorskip("transformers")

OURS = {"rms_norm", "rope_qk_norm", "triton_attention_forward", "add_rms_norm", "swiglu", "cross_entropy"}
TOKENS = torch.randint(0, 96, (2, 11), generator=torch.Generator().manual_seed(1))


def qwen3(**changes: Any) -> Any:
    fields = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **changes,
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**fields))


def llama(**changes: Any) -> Any:
    fields = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, **changes,
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**fields))


def windowed(family: str, **changes: Any) -> Any:
    """A model whose attention sees four tokens, in the second of two layers where a family can say so."""
    fields = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4, **changes,
    }  # fmt: skip
    if family != "mistral":
        layers = ["full_attention", "sliding_attention"]
        fields |= {"use_sliding_window": True, "layer_types": layers, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **fields))


def loss_and_gradients(model: Any, call: Any = None, **batch: Any) -> list[Tensor]:
    model.zero_grad()
    loss = (model if call is None else call)(input_ids=TOKENS, labels=TOKENS, use_cache=False, **batch).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def agree(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=2e-6), (one - other).abs().max()


def first_layout(shape: Gemm) -> str:
    return "triton" if shape.layout == "nn" else "torch"


@pytest.mark.parametrize(("family", "matmul"), [(qwen3, "torch"), (qwen3, first_layout), (llama, "torch")])
def test_one_call_serves_eager_and_compiled_steps(family: Any, matmul: Any) -> None:
    """fullgraph=True fails at any break; the graphs hold our operators, and torch's attention and mask nowhere."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    model = family()
    plain = loss_and_gradients(model)
    P.patch(model, matmul=matmul)
    agree(loss_and_gradients(model), plain)
    agree(loss_and_gradients(model, torch.compile(model, fullgraph=True, backend=backend)), plain)
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    ours = {name.split(".")[1] for name in called if name.startswith("flopcast.")}
    want = OURS if family is qwen3 else OURS - {"rope_qk_norm"} | {"rotary"}
    assert ours == want | ({"chosen_matmul"} if matmul is first_layout else set())
    assert not any("scaled_dot_product" in name or "tril" in name for name in called)
    assert sum("linear" in name for name in called) == (8 if matmul == "torch" else 0)


def in_fp16(model: Any, call: Any = None, **batch: Any) -> list[Tensor]:
    with torch.autocast("cpu", torch.float16):
        return loss_and_gradients(model, call, **batch)


def as_near(ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor]) -> None:
    """Ours are in fp32, and hardly farther from what is exact than theirs in 16 bits."""
    for one, other, right in zip(ours, theirs, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - right).norm() <= 1.5 * (other - right).norm() + 1e-4 * right.norm()


def nodes_of(loss: Tensor) -> list[str]:
    """The names of the nodes of autograd behind a loss."""
    found, waiting = dict[Any, None](), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [following for following, _ in node.next_functions]
    return [node.name() for node in found]


@pytest.mark.parametrize("family", [qwen3, llama])
def test_an_eager_step_in_16_bits_has_a_node_a_layer(family: Any) -> None:
    """Its loss and gradients are at most as far from fp32's as torch's are; also accumulated, and where a module is
    hooked."""
    model = family(num_hidden_layers=3)
    wide, theirs = loss_and_gradients(model), in_fp16(model)
    P.patch(model)

    as_near(in_fp16(model), theirs, wide)
    with torch.autocast("cpu", torch.float16):
        names = nodes_of(model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss)
    assert names.count("_LayerBackward") == 3
    assert not any(name.startswith(("Mm", "ToCopy", "Add")) for name in names)
    with torch.autocast("cpu", torch.float16):
        again = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    again.backward()
    as_near([parameter.grad / 2 for parameter in model.parameters()], theirs[1:], wide[1:])
    hook = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    with torch.autocast("cpu", torch.float16):
        loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    assert nodes_of(loss).count("_LayerBackward") == 2
    as_near(in_fp16(model), theirs, wide)
    hook.remove()


def test_a_whole_layer_gives_way_to_what_changes_it() -> None:
    """Padding, frozen weights, another norm's input, checkpointing, no gradients: by modules, and right."""
    model, padding = qwen3(num_hidden_layers=2), torch.ones(2, 11, dtype=torch.long)
    padding[0, :3] = 0
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        plain, padded = (
            model(input_ids=TOKENS, attention_mask=mask, use_cache=False).logits for mask in (None, padding)
        )
    P.patch(model)

    def logits(mask: Tensor | None = None) -> tuple[Tensor, list[str]]:
        with torch.autocast("cpu", torch.float16):
            out = model(input_ids=TOKENS, attention_mask=mask, use_cache=False).logits
        return out, nodes_of(out)

    with torch.no_grad():
        assert torch.allclose(logits()[0].float(), plain.float(), atol=3e-3)
    for change, nodes in (
        (lambda: None, 2),
        (lambda: model.model.layers[0].mlp.up_proj.weight.requires_grad_(False), 1),
        (lambda: model.gradient_checkpointing_enable({"use_reentrant": False}), 0),
    ):
        change()
        out, names = logits()
        assert names.count("_LayerBackward") == nodes
        assert torch.allclose(out.float(), plain.float(), atol=3e-3)
    out, names = logits(padding)
    assert "_LayerBackward" not in names
    assert torch.allclose(out.float()[padding.bool()], padded.float()[padding.bool()], atol=3e-3)


def test_what_reads_a_layers_output_gets_the_sum() -> None:
    """A layer's output that is changed on its way is normed anew."""
    model = qwen3(num_hidden_layers=2)
    model.model.layers[0].register_forward_hook(lambda module, given, out: out * 1.5)
    wide, theirs = loss_and_gradients(model), in_fp16(model)
    P.patch(model)
    as_near(in_fp16(model), theirs, wide)


def test_a_batch_with_padding_is_right_and_unpatch_restores() -> None:
    model, padding = qwen3(), torch.ones(2, 11, dtype=torch.long)
    padding[0, :3] = 0
    plain, padded = loss_and_gradients(model), loss_and_gradients(model, attention_mask=padding)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    packs = loss_and_gradients(model, position_ids=packed)
    before = model.config._attn_implementation
    with P.patched(model):
        P.patch(model)  # twice is once
        agree(loss_and_gradients(model, attention_mask=padding), padded)
        agree(loss_and_gradients(model, position_ids=packed), packs)
        assert model.config._attn_implementation != before
    assert model.config._attn_implementation == before
    assert all("forward" not in module.__dict__ for module in model.modules())
    for one, other in zip(loss_and_gradients(model), plain, strict=True):
        assert torch.equal(one, other)


PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8]])


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_windows_and_packed_sequences_run_on_the_kernels(family: str) -> None:
    """Without a mask of all pairs, eager and compiled, and as torch's."""
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return aot_eager(graph, inputs)

    model = windowed(family)
    plain, packs = loss_and_gradients(model), loss_and_gradients(model, position_ids=PACKED)
    assert not torch.allclose(plain[0], packs[0])
    P.patch(model)
    if family == "qwen2":
        agree(loss_and_gradients(model, position_ids=PACKED), packs)
    else:
        agree(loss_and_gradients(model), plain)
        call = torch.compile(model, fullgraph=True, backend=backend)
        agree(loss_and_gradients(model, call, position_ids=PACKED), packs)
        assert "flopcast.triton_attention_forward.default" in called
        assert not any("scaled_dot_product" in name or "tril" in name for name in called)


def test_cumulative_lengths_say_where_documents_begin() -> None:
    model = qwen3()
    P.patch(model)
    given = {"input_ids": TOKENS[:1], "use_cache": False}
    lengths = torch.tensor([0, 6, 11], dtype=torch.int32)
    ours = model(**given, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=6, max_length_k=6).logits
    apart = [model(TOKENS[:1, part], use_cache=False).logits for part in (slice(6), slice(6, 11))]
    assert torch.allclose(ours[:, :6], apart[0], atol=1e-5)  # of the second, rotation alone is elsewhere
    assert torch.allclose(ours[:, 6:], apart[1], atol=1e-4)  # which changes nothing either


def test_generation_reads_its_cache() -> None:
    model = qwen3().eval()
    plain = model.generate(TOKENS[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    with P.patched(model):
        assert torch.equal(model.generate(TOKENS[:1], max_new_tokens=3, do_sample=False, pad_token_id=0), plain)


def test_the_profile_of_a_gpu_chooses_the_products() -> None:
    """fp32 ones are the library's by any profile; what is asked is the function that forecasts ask."""
    import flopcast
    from flopcast.errors import UsageError
    from flopcast.kernels.matmul_chosen import backend_of
    from flopcast.roofline.gpu.library.fastest import product_choice
    from flopcast.roofline.gpu.library.profiles import find_profile

    model = qwen3()
    plain = loss_and_gradients(model)
    with pytest.raises(UsageError, match="0 x 0: give both"):
        flopcast.patch(model, "nvidia-h200", attention="best")
    flopcast.patch(model, "nvidia-h200")
    agree(loss_and_gradients(model), plain)
    choose, name = product_choice(find_profile("nvidia-h200")), model.lm_head._flopcast_products
    for size in (1024, 1536, 4096, 12288):
        want = choose(Gemm(m=8192, n=size, k=1024, layout="nn"))
        assert backend_of(name, 8192, size, 1024, torch.bfloat16, "nn") == want


class TestMasks:
    SEEN = torch.ones(7, 7, dtype=torch.bool).tril()

    @pytest.mark.parametrize("batch", [(), (1, 1), (3, 1), (2, 4)])
    def test_the_causal_one_is_known_however_it_is_said(self, batch: tuple[int, ...]) -> None:
        seen = self.SEEN.expand(*batch, 7, 7)
        assert is_causal_mask(seen, 7, 7)
        for lowest in (-torch.inf, torch.finfo(torch.float16).min):
            additive = torch.zeros(*batch, 7, 7, dtype=torch.float16).masked_fill(~seen, lowest)
            assert is_causal_mask(additive, 7, 7)

    def test_no_other_is_taken_for_it(self) -> None:
        padded, far, biased = (
            self.SEEN.clone(),
            self.SEEN.clone(),
            torch.zeros(7, 7).masked_fill(~self.SEEN, -torch.inf),
        )
        padded[:, 0] = False
        far[0, 6] = True
        biased[3, 1] = -0.5
        mild = torch.zeros(7, 7).masked_fill(~self.SEEN, -10.0)
        for mask in (padded, far, biased, mild, torch.ones(7, 7, dtype=torch.bool), self.SEEN[1:]):
            assert not is_causal_mask(mask, mask.shape[0], 7)

    def test_a_mask_that_changes_is_looked_at_again(self) -> None:
        mask = self.SEEN.clone()
        assert is_causal_mask(mask, 7, 7)
        mask[0, 6] = True
        assert not is_causal_mask(mask, 7, 7)

    def test_a_causal_mask_is_not_used_and_another_is_sdpas(self) -> None:
        q, k, v = (torch.randn(1, heads, 7, 16) for heads in (4, 2, 2))
        module = torch.nn.Module()
        module.num_key_value_groups = 2  # type: ignore[assignment]
        causal, _ = transformers_attention(module, q, k, v, None)
        told, _ = transformers_attention(module, q, k, v, self.SEEN[None, None])
        assert torch.equal(causal, told)
        window = self.SEEN & ~self.SEEN.tril(-3)
        seen, _ = transformers_attention(module, q, k, v, window[None, None], sliding_window=3)
        assert torch.equal(seen, transformers_attention(module, q, k, v, None, sliding_window=3)[0])
        out, _ = transformers_attention(module, q, k, v, window[None, None])
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, window[None, None], enable_gqa=True)
        assert torch.allclose(out, want.transpose(1, 2), atol=1e-6)
        assert torch.allclose(seen, out, atol=1e-6)
        assert not is_causal_mask(window, 7, 7)
        assert not is_causal_mask(window, 7, 7, 4)


def test_what_it_cannot_do_is_refused() -> None:
    q = torch.ones(1, 2, 4, 16)
    for refused in (
        {"dropout": 0.1},
        {"softcap": 50.0},
        {"position_bias": q},
        {"sliding_window": 3, "is_causal": False},
    ):
        with pytest.raises(NotImplementedError, match="use attn_implementation 'sdpa'"):
            transformers_attention(None, q, q, q, None, **refused)
    with pytest.raises(NotImplementedError, match="head_dim 24"):
        P.patch(qwen3(head_dim=24))
    with pytest.raises(NotImplementedError, match="no dropout"):
        P.patch(qwen3(attention_dropout=0.1))
    with pytest.raises(ValueError, match="known are torch, triton"):
        P.patch(qwen3(), matmul="cutlass")
    with pytest.raises(ValueError, match="no layers of Qwen3, Qwen2, Llama or Mistral"):
        P.patch(torch.nn.Linear(2, 2))
    model = qwen3()
    P.patch(model, matmul=lambda shape: "fastest")
    with pytest.raises(ValueError, match="unknown matmul backend 'fastest'"):
        model(TOKENS)
