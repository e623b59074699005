"""Image models by name: they are the published ones, of the size and layout asked for."""

from __future__ import annotations

import pytest
import torch

from flopcast.errors import UsageError
from flopcast.microbench import images
from flopcast.roofline.step.device_work import describe_ops
from flopcast.roofline.stream.library.modules import module_stream
from flopcast.roofline.stream.lowering.describe import Work
from flopcast.roofline.stream.lowering.variants import ConvVariant
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.tracer.trace import load_factory

# As torchvision, or the paper, tells them, with 1000 classes.
PUBLISHED = {
    "resnet18": 11_689_512, "resnet50": 25_557_032, "mobilenet_v2": 3_504_872, "efficientnet_b0": 5_288_548,
    "vit_b16": 86_567_656, "convnext_tiny": 28_589_128,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_parameters_that_were_published(name: str) -> None:
    with torch.device("meta"):
        module, batch = load_factory(name)(batch=2)
    assert sum(p.numel() for p in module.parameters()) == PUBLISHED[name]
    assert batch["pixel_values"].shape == (2, 3, 224, 224)


def test_size_and_layout_are_those_of_the_name() -> None:
    def convolutions(name: str) -> list[Work]:
        stream = module_stream(name, Run(optimizer="adamw-fused"), "cuda", sizes={"batch": 4})
        return [work for work in describe_ops(stream) if work is not None and work.op_class == "conv"]

    small, large, last = map(convolutions, ("resnet18@64", "resnet18@128", "resnet18@64@nhwc"))
    assert sum(work.flops for work in large) == 4 * sum(work.flops for work in small)
    assert [work.flops for work in last] == [work.flops for work in small]
    assert {work.variant.layout for work in small if isinstance(work.variant, ConvVariant)} == {"nchw"}
    assert {work.variant.layout for work in last if isinstance(work.variant, ConvVariant)} == {"nhwc"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet50@8", "images of 8 pixels a side"),
        ("resnet5", "module 'resnet5': valid are .* MODEL.* resnet18"),
        ("timm/resnet50", "module timm/resnet50 needs timm .*`pip install timm`; without it valid are resnet18"),
    ],
)
def test_what_is_no_model_is_refused_in_words(name: str, words: str) -> None:
    if "/" in name:
        with pytest.raises(UsageError, match=words):
            load_factory(name)(batch=1)
    else:
        with pytest.raises(UsageError, match=words):
            load_factory(name)


def test_a_library_s_models_are_taken_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def create_model(name: str) -> torch.nn.Module:
            assert name == "tiny_net"
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, images.CLASSES))

    monkeypatch.setattr(images.importlib, "import_module", lambda name: {"timm": Library}[name])
    made = images.named("timm/tiny_net@32")
    assert made is not None
    module, batch, loss = made(batch=3)
    assert loss(module(batch)).ndim == 0
