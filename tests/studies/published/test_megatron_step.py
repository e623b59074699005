"""What Megatron's step under tensor parallel launches: its products, its collectives, and what a rank holds of them."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import NO_HOST
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library.modules import Module, run_of_stream
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.collectives import collectives
from flopcast.roofline.stream.ops.op_stream import Stream
from studies.published.megatron import GPU, Sum, departure, judged_layers
from studies.published.megatron_step import Recompute, make_step

HIDDEN, LAYERS, HEADS, SEQ, VOCABULARY = 256, 2, 4, 64, 512
MICRO_BATCH, MICRO_BATCHES = 2, 2
TOKENS, HALF = MICRO_BATCH * SEQ, 2
PROFILE = find_profile(GPU)


@cache
def traced(tp: int = 2, recompute: Recompute = "full", sequence_parallel: bool = False) -> Stream:
    sizes = (HIDDEN, LAYERS, HEADS, tp, MICRO_BATCH, MICRO_BATCHES * MICRO_BATCH, SEQ, VOCABULARY)
    run = Run(parallel=f"own=1x{tp}")
    return Module(partial(make_step, *sizes, recompute, sequence_parallel)).stream(run, "cuda", PROFILE.device)


def flops(stream: Stream) -> tuple[int, int]:
    """Of all ranks' products: those of the step, and all that run."""
    run = Run(parallel=stream.meta["parallel"]["layout"])
    found = PricedStep(stream, run_of_stream(stream, run), PROFILE, NO_HOST).forecast()
    return found.flops_counted, found.flops_hardware


def moved(stream: Stream) -> Counter[str]:
    """Collectives by kind, of those that move a micro-batch's activations."""
    return Counter(one.kind for one in collectives(stream) if one.bytes == TOKENS * HIDDEN * HALF)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_products_of_all_ranks(recompute: Recompute) -> None:
    linear, attention, head = 24 * TOKENS * HIDDEN**2, 4 * TOKENS * SEQ * HIDDEN, 2 * TOKENS * HIDDEN * VOCABULARY
    # every rank has its share of each product: two have as many FLOPs in all as four
    counted = MICRO_BATCHES * (3 * LAYERS * (linear + attention) + 3 * head)
    again = {"none": 0, "selective": attention, "full": linear + attention}[recompute]
    for tp in (2, 4):
        assert flops(traced(tp, recompute)) == (counted, counted + MICRO_BATCHES * LAYERS * again)


def test_collectives_of_a_layer() -> None:
    of_each = 2 + 2  # forward, backward
    around = 2  # the embedding's forward and the head's backward
    assert moved(traced(2, "none")) == {"all_reduce": MICRO_BATCHES * (of_each * LAYERS + around)}
    assert moved(traced(2, "full")) == {"all_reduce": MICRO_BATCHES * ((of_each + 2) * LAYERS + around)}
    # two inputs gathered forward and again for their weights, two gradients; what the ranks add up is scattered
    divided = moved(traced(recompute="selective", sequence_parallel=True))
    gathered = 6 * LAYERS + 3
    assert divided == {"all_gather": MICRO_BATCHES * gathered, "reduce_scatter": MICRO_BATCHES * (4 * LAYERS + 2)}


def test_the_loss_is_reduced_over_the_vocabulary() -> None:
    small = [one.bytes for one in collectives(traced(2, "full")) if one.bytes == TOKENS * 4]
    assert len(small) == 3 * MICRO_BATCHES  # the largest logit, the target's, the sum of exponentials


def test_rows_that_are_sums_are_straight_lines() -> None:
    def sums(milliseconds: float, per_layer: float, micro_batch: int = 1) -> list[Sum]:
        return [
            Sum(1024, layers, 16, 1024, 2, micro_batch, micro_batch * count, milliseconds + count * layers * per_layer)
            for layers in (12, 16, 24) for count in (2, 4, 8)
        ]  # fmt: skip

    straight = sums(5.0, 1.0)
    assert departure(straight) == pytest.approx(0.0, abs=1e-9)
    assert departure([*sums(5.0, 1.0)[:-1], Sum(1024, 24, 16, 1024, 2, 1, 8, 5.0 + 8 * 24.5)]) > 0.1


def test_published_layers_take_as_long_as_the_guide_says() -> None:
    """The 22B model's on eight A100s, to which nothing was fitted: the first of five ways, since each takes seconds."""
    assert abs(next(judged_layers()).error) < 0.035
