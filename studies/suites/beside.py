"""Which calls the suites "inference", "fine-tune", "images" and "precisions" measure: what is launched beside training
of language models with AdamW, where no case of the suite "standard" is of its kind.

Of inference: products of few rows, for which libraries have kernels of their own, the attention of one token over a
long cache, the copies that grow the cache, and products of weights in fp8 and int4 with the casts around them. Of
fine-tuning: what other optimizers launch. Of images: convolutions of all forms, and what stands around them. Of
precisions: random products in fp32, tf32 and fp16, what autocast to fp16 and its gradient scaler launch, and experts in
bf16.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from flopcast.kernels.shapes import Call, Gemm, Operand, Shape
from flopcast.microbench.recipe.quantised import GROUP, INNER_TILES
from flopcast.microbench.recipe.settings import QUANTISED
from flopcast.roofline.gpu import suites
from flopcast.roofline.gpu.suites import FINE_TUNE, HOT_BYTES, IMAGES, INFERENCE, PRECISIONS, SuiteCase
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.variants import ConvVariant, KernelKind
from studies.suites.build import works
from studies.suites.calls import CallPlan, call_cases
from studies.suites.drawing import distinct, first
from studies.suites.gemms import LAYOUTS, draw_random, layer
from studies.suites.plans import Source

# Models that no step of `validation.step_plans` runs are fitted; the holdout has others' widths.
_DECODES = tuple(
    Source(precision="bf16", phase="decode", batch=batch, context=context, **model)
    for model in ({"width": 512}, {"width": 1536}, {"width": 3072}, {"config": "gpt2"})
    for batch, context in ((2, 300), (24, 1500))
)
_HELD_DECODES = tuple(
    Source(precision="bf16", phase="decode", batch=batch, context=2000, **model)
    for model in ({"width": 1280}, {"config": "llama-3.2-1b"})
    for batch in (4, 40)
)
# Of few sequences, whose reductions have too few rows to fill a GPU.
_FEW_SEQUENCES = {
    "fit": tuple(
        Source(precision="bf16", phase="decode", batch=batch, context=300, width=width)
        for width in (512, 1536, 2048, 3072)
        for batch in (1, 3)
    ),
    "holdout": tuple(
        Source(precision="bf16", phase="decode", batch=batch, context=300, width=width)
        for width in (1280, 2304)
        for batch in (1, 2)
    ),
}
# Weights of few bits: a decode and a prefill, whose activations are cast in fp8.
_QUANTISED = tuple(
    Source(precision="bf16", phase=phase, batch=batch, context=context, width=width, base_dtype=weights)
    for weights in QUANTISED
    for phase, batch, context, width in (("decode", 24, 300, 512), ("prefill", 2, 1024, 1536), ("decode", 4, 300, 3072))
)
_HELD_QUANTISED = tuple(
    Source(precision="bf16", phase="prefill", batch=3, context=512, width=1280, base_dtype=weights)
    for weights in QUANTISED
)
_OPTIMIZERS = tuple(
    Source(optimizer=optimizer, width=width)
    for optimizer in ("muon", "adafactor", "adafactor-foreach", "sgd-momentum")
    for width in (512, 1536, 3072)
)
_HELD_OPTIMIZERS = tuple(replace(source, width=2304) for source in _OPTIMIZERS[::3])


def _in_both_layouts(sizes: Mapping[str, Sequence[tuple[int, int]]]) -> tuple[Source, ...]:
    """Steps of image models, each of (pixels of a side, batch), channels first and channels last."""
    return tuple(
        Source(module=f"{model}@{size}{layout}", batch=batch)
        for model, own in sizes.items()
        for layout in ("", "@nhwc")
        for size, batch in own
    )


_MODELS = ("mobilenet_v2", "efficientnet_b0", "convnext_tiny", "resnet18", "vit_b16")
_IMAGES = tuple(
    Source(module=f"{model}@{size}{layout}", batch=batch)
    for model in _MODELS
    for layout in ("", "@nhwc")
    for size, batch in ((160, 32), (224, 24), (256, 160), (288, 64))
)
_HELD_IMAGES = tuple(Source(module=f"{model}@192{layout}", batch=80) for model in _MODELS for layout in ("", "@nhwc"))
# Of image models, convolutions alone: the sizes and batches that are trained in, and others between.
_CONVOLVED = {
    "fit": _in_both_layouts({
        "resnet50": ((224, 64), (224, 128), (176, 96), (320, 12)),
        "resnet34": ((224, 64), (208, 20), (128, 48)),
        "efficientnet_b0": ((224, 64), (224, 128), (208, 20), (240, 40)),
        "efficientnet_b3": ((300, 16), (224, 64), (128, 48)),
        "convnext_base": ((224, 64), (240, 40), (128, 48)),
        "mobilenet_v2": ((224, 64), (224, 128), (176, 96), (240, 40)),
    }),
    "holdout": _in_both_layouts({
        "resnet101": ((232, 36),), "resnet18": ((248, 88),), "efficientnet_b2": ((260, 28),),
        "convnext_small": ((216, 56),), "mobilenet_v2": ((232, 112),),
    }),
}  # fmt: skip
# And all convolutions of whole steps, held out, however alike they are.
_WHOLE_STEPS = _in_both_layouts({
    "resnet50": ((224, 48),), "resnet18": ((224, 192),), "efficientnet_b1": ((240, 72),),
    "mobilenet_v2": ((224, 200),), "convnext_tiny": ((224, 100),),
})  # fmt: skip
# More of those that are no depthwise ones, whose kernels cuDNN chooses by no rule that a law could have: the closer a
# row, the likelier it has the same. Held out again are all of whole steps, of models, sizes and batches of which no row
# was taken before.
_MORE_CONVOLVED = {
    "fit": _in_both_layouts({
        "resnet18": ((224, 64), (224, 256), (192, 40), (160, 128), (128, 16), (288, 32)),
        "resnet50": ((224, 32), (224, 256), (192, 80), (160, 24), (128, 112), (256, 48), (288, 16)),
        "mobilenet_v2": ((224, 32), (192, 96), (160, 56), (128, 128), (256, 16), (288, 80)),
        "efficientnet_b0": ((224, 32), (192, 112), (256, 20), (288, 56)),
        "efficientnet_b2": ((260, 64), (224, 24), (192, 48)),
        "convnext_tiny": ((224, 32), (224, 128), (192, 64), (160, 96), (128, 24), (256, 40), (288, 12)),
        "convnext_large": ((224, 24), (160, 64)),
    }),
    "holdout": _in_both_layouts({
        "resnet152": ((224, 44),), "resnet34": ((256, 72),), "efficientnet_b4": ((256, 30),),
        "convnext_small": ((208, 52),), "mobilenet_v2": ((176, 144),),
    }),
}  # fmt: skip
# And at sizes and batches drawn for each model: within half an octave of a fitted row with the same channels a held-out
# one was 2.8% off and 10% at the 90th percentile, farther from any 4 to 6 and 18%.
_AT_SIZES = (
    "resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3",
    "convnext_tiny", "convnext_base", "convnext_large",
)  # fmt: skip
_IMAGE_SIZES = (128, 144, 160, 176, 192, 208, 224, 240, 256, 272, 288, 300, 320)
_IMAGE_BATCHES = (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 256)
_SIZES_OF_EACH = 7
_HELD_AT_SIZES = _in_both_layouts({
    "resnet101": ((232, 60),), "resnet34": ((280, 104),), "efficientnet_b4": ((288, 52),),
    "convnext_small": ((248, 36),), "mobilenet_v2": ((200, 176),),
})  # fmt: skip
# Measured when all else of convolutions was done, to judge it.
_HELD_LAST = _in_both_layouts({
    "resnet152": ((216, 76),), "resnet18": ((264, 140),), "efficientnet_b2": ((232, 84),),
    "convnext_base": ((192, 68),), "mobilenet_v2": ((248, 104),),
})  # fmt: skip
_PRECISIONS = (
    *(Source(precision="autocast-fp16", width=width, batch=4, seq=512) for width in (512, 1536)),
    *(Source(precision="bf16", config="qwen3-moe", depth=2, batch=batch, seq=512) for batch in (1, 4, 16)),
)
_HELD_PRECISIONS = (
    Source(precision="autocast-fp16", width=2304, batch=2, seq=768),
    Source(precision="bf16", config="qwen3-moe", depth=2, batch=6, seq=768),
)
SOURCES = {
    IMAGES: {"fit": _IMAGES, "holdout": _HELD_IMAGES},
    INFERENCE: {"fit": (*_DECODES, *_QUANTISED), "holdout": (*_HELD_DECODES, *_HELD_QUANTISED)},
    FINE_TUNE: {"fit": _OPTIMIZERS, "holdout": _HELD_OPTIMIZERS},
    PRECISIONS: {"fit": _PRECISIONS, "holdout": _HELD_PRECISIONS},
}
CALLS = {"fit": CallPlan(others=12, largest=4 * 10**9), "holdout": CallPlan(others=3, largest=4 * 10**9)}
# Of images; a variant of convolutions holds every window and number of channels.
FEWER = {
    "fit": CallPlan(conv=60, others=5, largest=2 * 10**9),
    "holdout": CallPlan(conv=12, others=1, largest=2 * 10**9),
}
CONVOLVED = {
    "fit": CallPlan(conv=110, others=0, largest=2 * 10**9), "holdout": CallPlan(conv=16, others=0, largest=2 * 10**9)
}  # fmt: skip
MORE_CONVOLVED = CallPlan(conv=160, others=0, largest=2 * 10**9)  # of those that are fitted
AT_SIZES = replace(MORE_CONVOLVED, conv=400)
FEWEST = {role: replace(plan, others=(plan.others + 1) // 2) for role, plan in FEWER.items()}

# Of a drawn product of few rows (nt: x[m, k] W[n, k]^T): rows, widths; and how many.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192)
WIDTHS = (512, 768, 896, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 8192)
RATIOS = (0.125, 0.25, 0.5, 1, 1, 1, 1.5, 2, 2.5, 3, 3.5, 4)
VOCABULARIES = (32_000, 50_304, 128_256, 151_936)
FEW_ROWS = {"fit": 170, "holdout": 45}
# Of keys and values and of narrow models: fewer columns than fill a GPU, so that libraries split the sum.
NARROW = (512, 640, 768, 896, 1024, 1152, 1280, 1536)
NARROW_ROWS, NARROW_SUMS = (1, 1, 1, 2, 3, 4, 6, 8), (1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 8192)
FEW_COLUMNS = {"fit": 60, "holdout": 20}
# At 1,024 columns cuBLAS takes clusters of two blocks up to k = 2,560, on which a product takes 1.6 times as long as at
# 768 and 1,152: 11.3 us of two rows at k = 2,048.
NEAR_1024, SUMS_OF_1024 = (960, 1024, 1024, 1024, 1088), (768, 896, 1024, 1280, 1536, 1792, 2048, 2304, 2560)
OF_1024_COLUMNS = {"fit": 36, "holdout": 12}
# Of weights of few bits, of each kind: a prefill's rows too, up to so many FLOPs.
MANY_ROWS = (256, 512, 1024, 2048, 4096)
QUANTISED_PRODUCTS = ("fp8", "int4")
PACKED = {"fit": 80, "holdout": 25}
MOST_PACKED_FLOPS = 2 * 10**11
# And more of those whose ninth in ten was 12 to 27% off with these: of seeds of their own (MORE_SEEDS).
MORE_PACKED = {"fit": {"fp8": 100, "int4": 200}, "holdout": {"fp8": 25, "int4": 50}}
# Of int4 and a prefill's many rows, for which the kernel unpacks the weights again and again: real ones took half as
# long again as they were forecast.
LONG_ROWS, LONG = (1024, 16384), {"fit": 50, "holdout": 14}
MOST_LONG_FLOPS = 6 * 10**11
# Random products of each dtype and layout, by role: half as many points as bf16 needs for 4% at the median.
BY_DTYPE = {"fit": {"fp32": 28, "tf32": 28, "fp16": 16}, "holdout": {"fp32": 14, "tf32": 14, "fp16": 7}}
# And more of those that were further off than bf16 with these, of seeds of their own.
MORE_BY_DTYPE = {"fit": {"tf32": 100, "fp16": 50, "fp32": 20}, "holdout": {"tf32": 20, "fp16": 12, "fp32": 8}}
MORE_SEEDS = {"fit": 23, "holdout": 24}
MOST_FLOPS = 4 * 10**11  # 8 ms in fp32
# Of experts in fp32, which torch multiplies one by one: a product's few rows, and what an expert and a router are wide.
# cuBLAS divides the sums of some over blocks, in two kernels, of which random products, of more rows, tell little.
EXPERT_ROWS, EXPERT_WIDTHS = (4, 4096), (512, 768, 1024, 1408, 1536, 2048, 2560, 2880, 3072, 4096)
EXPERTS = {"fit": 70, "holdout": 20}  # of each layout
# Of attention of one token, with keys and values of CONTEXTS tokens.
BATCHES = (1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
KV_HEADS, GROUPS, HEAD_DIMS = (1, 2, 4, 5, 8, 8, 12, 16), (1, 2, 2, 3, 4, 4, 8), (64, 128, 128)
CONTEXTS = (129, 257, 401, 513, 769, 1025, 1537, 2049, 3001, 4097, 6145, 8193, 12289, 16385, 32769)
ATTENTIONS = {"fit": 110, "holdout": 35}
SPARE = 128  # the places of a static cache beyond the context, whose attention has a mask and a key for every head
MASKED = {"fit": 60, "holdout": 20}
MORE_ATTENTIONS = {"fit": 220, "holdout": 60}
MORE_MASKED = {"fit": 60, "holdout": 15}
MOST_BYTES = 2 * 10**9
# Of layer norms and their gradients in fp32: a model has few sizes, and torch two ways for the gradient, by the rows.
NORM_SIDES = (7, 8, 10, 12, 14, 16, 20, 24, 28, 40, 48, 56, 64, 72)
NORM_CHANNELS = (96, 128, 192, 256, 384, 512, 768, 1024)
NORM_ROWS = {"short": (1_000, 64 * 1024), "long": (64 * 1024 + 1, 1_500_000)}
NORMS = {"fit": 4, "holdout": 1}  # of each direction, layout and range of rows; twice as many where all is contiguous
# Of convolutions in bf16, of each direction and layout: those of one place, of which models have few sizes that are
# alike, and windows of others, also of every second place.
SIDES = (5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40, 48, 56)
CHANNELS = (
    16, 24, 32, 40, 64, 80, 96, 112, 128, 160, 192, 240, 256, 320, 384, 480, 512, 576, 672, 768, 960, 1024, 1152, 1536,
    2048,
)  # fmt: skip
WINDOWS = {"point": ((1, 1),), "dense": ((1, 2), (2, 2), (3, 1), (3, 1), (3, 2))}  # places of a side, and of a stride
# 1x1 convolutions, channels first, which cuDNN multiplies as they lie or between conversions: the nearest of
# many rows tells which. Times as many results as channels, as in blocks that widen and narrow.
CONV_1X1 = 3600
WIDENINGS = (1 / 6, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 1, 1, 2, 3, 4, 6, 6)
CONVOLUTIONS = {"fit": {"point": 30, "dense": 16}, "holdout": {"point": 9, "dense": 5}}
MOST_CONVOLUTION_FLOPS = 2 * 10**11
SEEDS = {"fit": 21, "holdout": 22}


def cases_of(name: str) -> list[SuiteCase]:
    """The cases of one of SOURCES, fit and holdout."""
    usual = suites.load("standard")
    known = {_kind(describe(case.shape, case.backend)) for case in usual}
    cases: list[SuiteCase] = []
    fitted: set[Call] = set()
    for is_packed in (False, True):  # weights of few bits last, of which only what nothing before has counts
        for role, sources in SOURCES[name].items():
            own = [source for source in sources if (source.base_dtype in QUANTISED) is is_packed]
            new = [
                work
                for work in works(own, "cuda")
                if isinstance(work.shape, Call) and (_kind(work) not in known or work.op_class == "conv")
            ]
            drawn_below = [work for work in new if work.op_class in ("attention", "gemm") and name == INFERENCE]
            plan = {IMAGES: FEWER, PRECISIONS: FEWEST}.get(name, CALLS)[role]
            cases += call_cases([work for work in new if work not in drawn_below], plan, role, without=fitted)
            fitted |= {case.shape for case in cases if isinstance(case.shape, Call)}
        known |= {_kind(describe(case.shape, case.backend)) for case in cases}
    if name == INFERENCE:
        drawn = {case.shape for case in usual if isinstance(case.shape, Gemm)}
        taken: set[Call] = set()
        packed: set[Gemm | Call] = set()
        for role in SOURCES[name]:
            cases += [case for shape in _products(role, drawn) for case in _cold_and_hot(shape, role)]
            rng = partial(random.Random, SEEDS[role])
            drawn_calls = (
                *_attentions(rng(), ATTENTIONS[role], taken),
                *_packed(rng(), dict.fromkeys(QUANTISED_PRODUCTS, PACKED[role]), packed),
            )
            cases += [case for shape in drawn_calls for case in _cold_and_hot(shape, role)]
        for role, sources in _FEW_SEQUENCES.items():
            cases += [case for shape in _narrow(role, drawn) for case in _cold_and_hot(shape, role)]
            written_before = (*_masked(random.Random(SEEDS[role]), MASKED[role], taken), *_reductions(sources))
            cases += [case for shape in written_before for case in _cold_and_hot(shape, role, every=1)]
    cases += [*drawn_beside(name), *traced_beside(name)]
    if name == PRECISIONS:
        products: set[Gemm] = set()
        for role in SOURCES[name]:
            by_dtype = _by_dtype(random.Random(SEEDS[role]), BY_DTYPE[role], products)
            cases += [SuiteCase(shape, "torch", "cold", role) for shape in by_dtype]
    return distinct_cases(cases)


def distinct_cases(cases: Sequence[SuiteCase]) -> list[SuiteCase]:
    """The cases, the first of those of a shape and cache state."""
    return list({(case.shape.key, case.cache): case for case in reversed(cases)}.values())[::-1]


def drawn_beside(name: str) -> list[SuiteCase]:
    """What is drawn for a suite of traced calls whatever they are, so that it can be added to a shipped one."""
    calls: set[Call] = set()
    products: set[Gemm] = set()
    packed: set[Gemm | Call] = set()
    if name == PRECISIONS:
        experts = [
            case for role in SOURCES[name] for shape in _of_experts(role, products)
            for case in _cold_and_hot(shape, role)
        ]  # fmt: skip
        more = [
            SuiteCase(shape, "torch", "cold", role)
            for role, counts in MORE_BY_DTYPE.items()
            for shape in _by_dtype(random.Random(MORE_SEEDS[role]), counts, products)
        ]
        return experts + more
    if name == INFERENCE:
        return [
            case
            for role, seed in MORE_SEEDS.items()
            for shape in (
                *_attentions(random.Random(seed), MORE_ATTENTIONS[role], calls),
                *_masked(random.Random(seed), MORE_MASKED[role], calls),
                *_packed(random.Random(seed), MORE_PACKED[role], packed),
                *_unpacked_again(random.Random(seed), LONG[role], packed),
            )
            for case in _cold_and_hot(shape, role)
        ]
    if name != IMAGES:
        return []
    return [
        case
        for draw in (_norms, _convolutions)
        for role in SOURCES[name]
        for shape in draw(role, calls)
        for case in _cold_and_hot(shape, role)
    ]


def traced_beside(name: str) -> list[SuiteCase]:
    """What is traced for a suite beside its sources, whatever they are: of image models the convolutions of _CONVOLVED,
    of _WHOLE_STEPS, of _MORE_CONVOLVED and at drawn sizes, none of which is both fitted and held out; and random ones
    that are near them."""
    if name != IMAGES:
        return []
    steps = {**_CONVOLVED, "whole": _WHOLE_STEPS, "before": _HELD_IMAGES}
    found = {
        role: [work for work in works(sources, "cuda") if work.op_class == "conv"] for role, sources in steps.items()
    }
    held = {work.shape for role in ("before", "whole") for work in found[role] if isinstance(work.shape, Call)}
    fitted = call_cases(found["fit"], CONVOLVED["fit"], "fit", ("cold",), without=held)
    known = held | {case.shape for case in fitted if isinstance(case.shape, Call)}
    judged = call_cases(found["holdout"], CONVOLVED["holdout"], "holdout", ("cold",), without=known)
    whole = [SuiteCase(work.shape, "torch", "cold", "holdout") for work in found["whole"]]
    cases = fitted + judged + whole
    for sources, plan, judged_of_them in (
        (_MORE_CONVOLVED["fit"], MORE_CONVOLVED, _MORE_CONVOLVED["holdout"]),
        (_drawn_sizes(), AT_SIZES, _HELD_AT_SIZES),
        ((), AT_SIZES, _HELD_LAST),
    ):
        taken = {case.shape for case in cases if isinstance(case.shape, Call)} | held
        cases += _more_convolved(sources, plan, judged_of_them, taken)
    both = [case for one in cases for case in _cold_and_hot(one.shape, one.role)]
    return both + [SuiteCase(shape, "torch", "cold", "fit") for shape in _conv_1x1()]


def _drawn_sizes() -> tuple[Source, ...]:
    """Steps of the models of _AT_SIZES at sizes and batches drawn for each."""
    rng = random.Random(SEEDS["fit"])
    return _in_both_layouts({
        model: [(rng.choice(_IMAGE_SIZES), rng.choice(_IMAGE_BATCHES)) for _ in range(_SIZES_OF_EACH)]
        for model in _AT_SIZES
    })  # fmt: skip


def _more_convolved(
    fitted: Sequence[Source], plan: CallPlan, judged: Sequence[Source], known: Collection[Call]
) -> list[SuiteCase]:
    """The convolutions that are no depthwise ones and not `known`: as many of the `fitted` steps as the plan takes, and
    all of those that are `judged`."""
    found = [
        [work for work in works(sources, "cuda") if work.op_class == "conv" and not _is_depthwise(work)]
        for sources in (fitted, judged)
    ]
    held = {work.shape for work in found[1] if isinstance(work.shape, Call)} - set(known)
    cases = call_cases(found[0], plan, "fit", ("cold",), without=held | set(known))
    return cases + [SuiteCase(shape, "torch", "cold", "holdout") for shape in sorted(held, key=lambda one: one.key)]


def _is_depthwise(work: Work) -> bool:
    return isinstance(work.variant, ConvVariant) and work.variant.form == "depthwise"


def _kind(work: Work) -> KernelKind:
    return KernelKind(work.op_class, work.variant)


def _cold_and_hot(shape: Shape, role: str, every: int = 2) -> list[SuiteCase]:
    """Cold, and of the shapes that an L2 holds every second (or each) hot as well."""
    is_hot = shape.bytes <= HOT_BYTES / 4 and shape.bytes // 512 % every == every - 1
    return [SuiteCase(shape, "torch", cache, role) for cache in ("cold", *(("hot",) if is_hot else ()))]


def _products(role: str, taken: Collection[Gemm]) -> list[Gemm]:
    """Random products of few rows, of linear layers and output layers."""
    rng, found = random.Random(SEEDS[role]), set(taken)

    def draw() -> Gemm:
        width = rng.choice(WIDTHS)
        n = rng.choice(VOCABULARIES) if rng.random() < 0.1 else round(width * rng.choice(RATIOS) / 64) * 64
        n, k = (n, width) if rng.random() < 0.6 or n > 2**15 else (width, n)
        return Gemm(m=rng.choice(ROWS), n=n, k=k)

    return list(distinct(partial(first, draw, lambda shape: shape.bytes <= MOST_BYTES), found, FEW_ROWS[role]))


def _narrow(role: str, taken: set[Gemm]) -> list[Gemm]:
    """Random products of one to eight rows with few columns."""
    rng = random.Random(SEEDS[role])

    def draw(columns: Sequence[int], sums: Sequence[int]) -> Gemm:
        return Gemm(m=rng.choice(NARROW_ROWS), n=rng.choice(columns), k=rng.choice(sums))

    return [
        *distinct(partial(draw, NARROW, NARROW_SUMS), taken, FEW_COLUMNS[role]),
        *distinct(partial(draw, NEAR_1024, SUMS_OF_1024), taken, OF_1024_COLUMNS[role]),
    ]


def _reductions(sources: Sequence[Source]) -> list[Call]:
    """The reductions of decodes, as they are traced."""
    return [
        work.shape for work in works(sources, "cuda") if isinstance(work.shape, Call) and work.op_class == "reduction"
    ]


def _sides(rng: random.Random) -> tuple[int, int]:
    """Random results and inputs of a linear layer, multiples of 128."""
    width = rng.choice(WIDTHS)
    other = max(128, round(width * rng.choice(RATIOS) / 128) * 128)
    return (other, width) if rng.random() < 0.5 else (width, other)


def _packed(rng: random.Random, counts: Mapping[str, int], taken: set[Gemm | Call]) -> list[Gemm | Call]:
    """Random products of linear layers with weights in each of QUANTISED_PRODUCTS, of few rows and of many."""

    def sizes() -> tuple[int, int, int]:
        n, k = _sides(rng)
        return rng.choice((*ROWS, *MANY_ROWS)), n, k

    def is_short(shape: Gemm | Call) -> bool:
        return describe(shape).flops <= MOST_PACKED_FLOPS

    def fp8() -> Gemm | Call:
        m, n, k = sizes()
        return Gemm(m=m, n=n, k=k, dtype="fp8")

    draws = dict(zip(QUANTISED_PRODUCTS, (fp8, lambda: product_of_4_bits(*sizes())), strict=True))
    return [
        shape
        for weights, draw in draws.items()
        for shape in distinct(partial(first, draw, is_short), taken, counts[weights])
    ]


def _unpacked_again(rng: random.Random, count: int, taken: set[Gemm | Call]) -> list[Gemm | Call]:
    """Random products of many rows with weights in int4."""

    def draw() -> Gemm | Call:
        low, high = LONG_ROWS
        rows = round(low * (high / low) ** rng.random() / 64) * 64
        return product_of_4_bits(rows, *_sides(rng))

    short = partial(first, draw, lambda shape: describe(shape).flops <= MOST_LONG_FLOPS)
    return list(distinct(short, taken, count))


def product_of_4_bits(m: int, n: int, k: int) -> Call:
    """Rows [m, k] in bf16 times weights [n, k] of 4 bits in groups of GROUP, as it is traced."""
    packed = _contiguous((n // 8, k // (16 * INNER_TILES), 32, INNER_TILES // 2), "int32")
    scales = _contiguous((k // GROUP, n, 2), "bf16")
    inputs = _contiguous((m, k), "bf16"), packed, scales
    arguments = f'[{{"t":0}},{{"t":1}},{GROUP},{{"t":2}}]'
    return Call("aten._weight_int4pack_mm.default", inputs, (_contiguous((m, n), "bf16"),), arguments)


def _by_dtype(rng: random.Random, counts: Mapping[str, int], taken: set[Gemm]) -> list[Gemm]:
    """Random products of the dtypes whose layouts have few points, so many of each layout."""

    def draw(layout: str, dtype: str) -> Gemm:
        return first(lambda: replace(draw_random(rng, layout), dtype=dtype), lambda shape: shape.flops <= MOST_FLOPS)

    return [
        shape
        for dtype, count in counts.items()
        for layout in LAYOUTS
        for shape in distinct(partial(draw, layout, dtype), taken, count)
    ]


def _of_experts(role: str, taken: set[Gemm]) -> list[Gemm]:
    """Random products of one expert in fp32, forward and backward, a quarter of odd numbers of rows."""
    rng = random.Random(SEEDS[role])

    def draw(layout: str) -> Gemm:
        low, high = EXPERT_ROWS
        rows = round(low * (high / low) ** rng.random())
        rows = rows if rng.random() < 0.25 else -(-rows // 8) * 8
        return replace(layer(layout, rows, rng.choice(EXPERT_WIDTHS), rng.choice(EXPERT_WIDTHS)), dtype="fp32")

    return [shape for layout in LAYOUTS for shape in distinct(partial(draw, layout), taken, EXPERTS[role])]


def _attentions(rng: random.Random, count: int, taken: set[Call]) -> list[Call]:
    """Random attentions of one token, over contiguous keys and values, as a cache that grew by it leaves them."""

    def draw() -> Call:
        batch, kv_heads, head_dim = rng.choice(BATCHES), rng.choice(KV_HEADS), rng.choice(HEAD_DIMS)
        return attention_of_one(batch, kv_heads * rng.choice(GROUPS), kv_heads, rng.choice(CONTEXTS), head_dim)

    return list(distinct(partial(first, draw, lambda call: call.bytes <= MOST_BYTES), taken, count))


def _masked(rng: random.Random, count: int, taken: set[Call]) -> list[Call]:
    """Random attentions of one token over a static cache, repeated for every head."""

    def draw() -> Call:
        batch, kv_heads, head_dim = rng.choice(BATCHES), rng.choice(KV_HEADS), rng.choice(HEAD_DIMS)
        heads = kv_heads * rng.choice(GROUPS)
        return attention_of_one(batch, heads, heads, rng.choice(CONTEXTS) - 1 + SPARE, head_dim, is_masked=True)

    return list(distinct(partial(first, draw, lambda call: call.bytes <= MOST_BYTES), taken, count))


def attention_of_one(
    batch: int, heads: int, kv_heads: int, keys: int, head_dim: int, *, is_masked: bool = False
) -> Call:
    """The attention of one token in bf16, as it is traced; with a mask as over a static cache."""
    query = _contiguous((batch, heads, 1, head_dim), "bf16")
    cache = _contiguous((batch, kv_heads, keys, head_dim), "bf16")
    outputs = query, _contiguous((batch, heads, 1), "fp32")
    masks = [_contiguous((batch, 1, 1, keys), "bf16")] if is_masked else []
    arguments = '[{"t":0},{"t":1},{"t":2},false' + (',{"t":3}]' if is_masked else "]")
    return Call("flopcast.attention.default", (query, cache, cache, *masks), outputs, arguments)


def _norms(role: str, taken: set[Call]) -> list[Call]:
    """Random layer norms over the channels of images, and their gradients, channels last in memory or not."""
    rng = random.Random(SEEDS[role])

    def draw(least: int, most: int, is_backward: bool, is_permuted: bool) -> Call:
        side, channels = rng.choice(NORM_SIDES), rng.choice(NORM_CHANNELS)
        rows = least * (most / least) ** rng.random()
        return layer_norm(max(round(rows / side**2), 1), side, channels, is_backward, is_permuted)

    def is_wanted(least: int, most: int, call: Call) -> bool:
        return least <= call.inputs[0].numel // call.inputs[0].shape[-1] <= most and call.bytes <= MOST_BYTES

    return [
        call
        for is_backward in (False, True)
        for is_permuted in (False, True)
        for rows in NORM_ROWS.values()
        for call in distinct(
            partial(first, partial(draw, *rows, is_backward, is_permuted), partial(is_wanted, *rows)),
            taken,
            NORMS[role] * (1 if is_permuted else 2),
        )
    ]


def _convolutions(role: str, taken: set[Call]) -> list[Call]:
    """Random convolutions of images in bf16 without a bias, and their gradients, channels last in memory or not."""
    rng = random.Random(SEEDS[role])

    def draw(form: str, is_last: bool, is_backward: bool) -> Call:
        window, stride = rng.choice(WINDOWS[form])
        side = max(rng.choice(SIDES), window + stride)
        channels, results = rng.choice(CHANNELS), rng.choice(CHANNELS)
        return convolution(
            round(2 ** rng.uniform(3, 7.5)), side, channels, results, window, stride, is_last, is_backward
        )

    def is_wanted(call: Call) -> bool:
        return call.bytes <= MOST_BYTES / 4 and describe(call).flops <= MOST_CONVOLUTION_FLOPS

    return [
        call
        for is_backward in (False, True)
        for is_last in (False, True)
        for form, count in CONVOLUTIONS[role].items()
        for call in distinct(partial(first, partial(draw, form, is_last, is_backward), is_wanted), taken, count)
    ]


def _conv_1x1() -> list[Call]:
    """Random 1x1 convolutions, channels first, of sizes as image models have them."""
    rng = random.Random(MORE_SEEDS["fit"])

    def draw() -> Call:
        side = round(2 ** rng.uniform(2.3, 6.4))
        side = 4 * max(round(side / 4), 1) if rng.random() < 0.4 else side
        channels = 8 * round(2 ** rng.uniform(1, 8))
        results = 8 * max(round(channels * rng.choice(WIDENINGS) / 8), 1)
        images = 4 * round(2 ** rng.uniform(1, 6))
        return convolution(images, side, channels, results, 1, 1, is_last=False, is_backward=rng.random() < 0.5)

    def is_wanted(call: Call) -> bool:
        _, channels, results, *_ = describe(call).features
        return max(channels, results) <= 11.2 and MOST_BYTES / 2**12 <= call.bytes <= MOST_BYTES / 4

    return list(distinct(partial(first, draw, is_wanted), set(), CONV_1X1))


def convolution(
    images: int, side: int, channels: int, results: int, window: int, stride: int, is_last: bool, is_backward: bool
) -> Call:
    """The convolution of square images by windows of `window` x `window` places, or the gradients of its input and
    weights, as they are traced. `is_last`: of images whose channels are last in memory."""
    margin = window // 2
    made = (side + 2 * margin - window) // stride + 1

    def tensor(count: int, depth: int, places: int) -> Operand:
        strides = (
            (depth * places**2, 1, depth * places, depth) if is_last else (depth * places**2, places**2, places, 1)
        )
        return Operand((count, depth, places, places), strides, "bf16")

    given, weights, result = (
        tensor(images, channels, side),
        tensor(results, channels, window),
        tensor(images, results, made),
    )
    how = f"[{stride},{stride}],[{margin},{margin}],[1,1],false,[0,0],1"
    if not is_backward:
        return Call("aten.convolution.default", (given, weights), (result,), f'[{{"t":0}},{{"t":1}},null,{how}]')
    arguments = f'[{{"t":0}},{{"t":1}},{{"t":2}},[0],{how},[true,true,false]]'
    return Call("aten.convolution_backward.default", (result, given, weights), (given, weights), arguments)


def layer_norm(images: int, side: int, channels: int, is_backward: bool, is_permuted: bool) -> Call:
    """The layer norm of each place of images in fp32, or its gradient, as it is traced. `is_permuted`: of images whose
    channels are not last in memory."""
    given = _contiguous((images, side, side, channels), "fp32")
    places = side * side
    strides = (channels * places, side, 1, places)
    data = replace(given, stride=strides) if is_permuted else given
    statistic, weight = _contiguous((images, side, side, 1), "fp32"), _contiguous((channels,), "fp32")
    if not is_backward:
        arguments = f'[{{"t":0}},[{channels}],{{"t":1}},{{"t":2}},1e-06]'
        return Call("aten.native_layer_norm.default", (data, weight, weight), (given, statistic, statistic), arguments)
    inputs = given, data, statistic, statistic, weight, weight
    arguments = f'[{{"t":0}},{{"t":1}},[{channels}],{{"t":2}},{{"t":3}},{{"t":4}},{{"t":5}},[true,true,true]]'
    return Call("aten.native_layer_norm_backward.default", inputs, (given, weight, weight), arguments)


def _contiguous(shape: Sequence[int], dtype: str) -> Operand:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return Operand(tuple(shape), tuple(reversed(strides)), dtype)
