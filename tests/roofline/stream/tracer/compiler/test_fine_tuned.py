"""What a compiled step launches that trains a part of its model: no gradient of what is frozen, adapters' products."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.compiled.launches import Kind
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.combinations import check_together
from flopcast.roofline.stream.model.models import load_config, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode

pytest.importorskip("triton")

LAYERS = 2
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
LINEAR = 7  # of a layer: q, k, v, o, gate, up, down


def products(compiled: Callable[[Asked], Future[OutputCode]], **asked: Any) -> list[int]:
    """How many products the forward and the backward launch."""
    code = compiled(Asked(config=QWEN3, batch=2, **asked)).result()
    return [
        sum(launch.kind == Kind.PRODUCT and launch.name != "bmm" for launch in graph.launches)
        for graph in read_output_code(code.text)
    ]


def test_layers_that_are_frozen_have_no_backward(compiled: Callable[[Asked], Future[OutputCode]]) -> None:
    forward, backward = products(compiled, finetune="last=1")
    assert forward == LAYERS * LINEAR + 1
    # gradients of the last layer's weights and inputs, of which the first norm's weight has its own, and of the output
    # layer's input
    assert backward == 2 * LINEAR + 1


def test_adapters_are_products_beside_frozen_ones(compiled: Callable[[Asked], Future[OutputCode]]) -> None:
    pytest.importorskip("peft")
    forward, backward = products(compiled, finetune="lora", lora_rank=8, lora_targets="q_proj,v_proj")
    assert forward == LAYERS * (LINEAR + 2 * 2) + 1
    # of each layer the inputs' gradients, of each adapter those of two weights and two inputs; the first layer's own
    # input has none
    of_layer = LINEAR + 2 * 4
    assert LAYERS * of_layer - 8 <= backward - 1 <= LAYERS * of_layer


@pytest.mark.usefixtures("compiled_in_one_process")
def test_a_part_costs_less_than_the_whole() -> None:
    """Of two layers of a model whose compiled stream ships, so that the part alone is compiled here."""
    profile, config = find_profile("nvidia-h200"), with_depth(load_config("qwen3-0.6b"), LAYERS)

    def forecast(mode: str = "compile", **options: Any) -> Any:
        run = Run(batch=4, seq=256, mode=mode, **options)
        return PricedStep(get_stream(config, traced_of(run, profile)), run, profile).forecast()

    whole, part = forecast(), forecast(finetune="last=1")
    assert part.device_seconds < whole.device_seconds
    assert part.flops_counted < whole.flops_counted
    assert part.memory["optimizer"] < whole.memory["optimizer"] / 2
    eager = forecast("eager", finetune="last=1")
    assert (part.n_params_trained, part.flops_6n) == (eager.n_params_trained, eager.flops_6n)


@pytest.mark.usefixtures("compiled_in_one_process")
@pytest.mark.parametrize("base_dtype", ["bf16", "fp32"])
def test_what_is_trained_is_the_same_in_every_mode(base_dtype: str) -> None:
    """Of layers that a compiled one stands for nothing is read, and generated kernels read frozen weights as bytes."""
    pytest.importorskip("peft")
    profile = find_profile("nvidia-h200")
    told = []
    for mode in ("eager", "compile"):
        run = Run(batch=2, seq=256, mode=mode, finetune="lora", lora_rank=8, base_dtype=base_dtype)
        config = {**QWEN3, "num_hidden_layers": 6}
        found = PricedStep(get_stream(config, traced_of(run, profile)), run, profile).forecast()
        told.append((found.n_params, found.n_params_trained, found.flops_6n))
    assert told[0] == told[1]


def test_four_bits_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'qlora' with mode 'compile': bitsandbytes.*or lora"):
        check_together(Run(mode="compile", finetune="qlora"))
