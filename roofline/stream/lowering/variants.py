"""Names of kernel variants, which tell one kernel from another, and of the surfaces by which a profile times them.

Kernels of one operation class differ in their variant: the layout and dtype of a product, the direction and mask of
an attention, the operation, dtypes and operand order of any other call. Files and printed tables hold them as
text, which only this module parses and formats:

    products        [batched/|grouped/|few/|rows/]LAYOUT/DTYPE[/unaligned]     nt/bf16, grouped/nn/fp32
    attention       DIRECTION/MASK/DTYPE/dHEAD_DIM[vVALUE_DIM]      fwd/causal/bf16/d128
    convolutions    DIRECTION/DTYPE/LAYOUT/FORM[/ALGORITHM]         bwd/bf16/nhwc/depthwise, fwd/bf16/nchw/point/direct
    other calls     OPERATION|DTYPES[|PATTERN]                      add|bf16+fp32>fp32|a,a>a
    a surface       BACKEND/CLASS/VARIANT/CACHE                     torch/gemm/nt/bf16/cold
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from flopcast.kernels.shapes import DTYPE_BYTES


@dataclass(frozen=True)
class GemmVariant:
    """Variant of a matrix product. `layout`: "nt", "nn", "tn" or "tt". `form`: "batched", "grouped", "few" (rows),
    "rows" (of fp8, a scale per row) or "" (single).

    `is_aligned`: every row of operands and result starts at a multiple of 16 bytes."""

    layout: str
    dtype: str
    form: str = ""
    is_aligned: bool = True

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES.get(self.dtype, 2)

    @property
    def row_axes(self) -> tuple[int, int]:
        """Which of m, n and k (as 0, 1, 2) the rows of the two operands run along: k and k for "nt"."""
        return 2 if self.layout[0] == "n" else 0, 2 if self.layout[1] == "t" else 1

    @property
    def dtypes(self) -> str:
        return self.dtype

    @property
    def tokens(self) -> tuple[str, ...]:
        """The parts of its name."""
        return tuple(
            part for part in (self.form, self.layout, self.dtype, "" if self.is_aligned else "unaligned") if part
        )

    def __str__(self) -> str:
        return "/".join(self.tokens)


@dataclass(frozen=True)
class AttentionVariant:
    """Variant of an attention. `direction`: "fwd" or "bwd"; `value_dim`: columns of values and results where they are
    others than those of queries and keys, `head_dim`, else 0; `is_masked`: a tensor is added to the scores."""

    direction: str
    is_causal: bool
    dtype: str
    head_dim: int
    value_dim: int = 0
    is_masked: bool = False

    @property
    def dtypes(self) -> str:
        return self.dtype

    @property
    def tokens(self) -> tuple[str, ...]:
        """The parts of its name."""
        columns = f"d{self.head_dim}" + (f"v{self.value_dim}" if self.value_dim else "")
        mask = "causal" if self.is_causal else "masked" if self.is_masked else "full"
        return self.direction, mask, self.dtype, columns

    def __str__(self) -> str:
        return "/".join(self.tokens)


@dataclass(frozen=True)
class ConvVariant:
    """Variant of a convolution. `direction`: "fwd", "dgrad" (gradient of the input), "wgrad" (of the weights) or "bwd"
    (both); `layout`: "nchw" or "nhwc"; `form`: "dense", "point" (a window of one place, at every place), "unaligned"
    (the same channels first of images whose places are no multiple of 8), "few" (of channels, no multiple of 8),
    "pooled" and "pooled-few" (of images of one place), "depthwise" or "grouped"; along one dimension or three
    "dense-1d", "dense-3d". `algorithm`: of one product of a 1x1 convolution, which is a part of it,
    "direct" or "converted" (`conv_1x1.py`); "" for a convolution as a whole."""

    direction: str
    dtype: str
    layout: str
    form: str
    algorithm: str = ""

    @property
    def dtypes(self) -> str:
        return self.dtype

    @property
    def tokens(self) -> tuple[str, ...]:
        """The parts of its name."""
        return tuple(part for part in (self.direction, self.dtype, self.layout, self.form, self.algorithm) if part)

    def __str__(self) -> str:
        return "/".join(self.tokens)


@dataclass(frozen=True)
class CallVariant:
    """Variant of a call that only moves bytes. `dtypes`: of operands and results ("bf16+fp32>fp32"); `pattern`: the
    relative memory order of the operands, or which dimensions are reduced (`describe.py`), "" for classes without."""

    operation: str
    dtypes: str = ""
    pattern: str = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The parts of its name."""
        return tuple(part for part in (self.operation, self.dtypes, self.pattern) if part)

    def __str__(self) -> str:
        return "|".join(self.tokens)


Variant = GemmVariant | AttentionVariant | ConvVariant | CallVariant


@dataclass(frozen=True)
class KernelKind:
    """A kind of kernel, whoever implements it: "gemm/nt/bf16"."""

    op_class: str
    variant: Variant

    def __str__(self) -> str:
        return f"{self.op_class}/{self.variant}"

    @classmethod
    def parse(cls, text: str) -> KernelKind:
        """Raises ValueError for a text that is none."""
        op_class, _, variant = text.partition("/")
        return cls(op_class, parse_variant(variant))


@dataclass(frozen=True)
class SurfaceKey:
    """The key by which a profile finds a surface. `cache`: "cold" or "hot", whether L2 holds the operands."""

    backend: str
    op_class: str
    variant: Variant
    cache: str

    def __str__(self) -> str:
        return f"{self.backend}/{self.op_class}/{self.variant}/{self.cache}"

    @classmethod
    def parse(cls, text: str) -> SurfaceKey:
        """Raises ValueError for a text that is no surface's name."""
        head, _, cache = text.rpartition("/")
        backend, op_class, variant = head.split("/", 2)
        return cls(backend, op_class, parse_variant(variant), cache)

    @property
    def kind(self) -> KernelKind:
        return KernelKind(self.op_class, self.variant)

    def with_cache(self, cache: str) -> SurfaceKey:
        """Returns the key of the same kernel's surface in another state of the cache."""
        return replace(self, cache=cache)


def twin_of(variant: Variant) -> Variant | None:
    """Returns what bf16 runs where this variant runs fp16: the same kernel, made for the other format of 16 bits. None
    for a variant without fp16."""
    text = str(variant)
    return parse_variant(text.replace("fp16", "bf16")) if "fp16" in text else None


@lru_cache(maxsize=8192)
def parse_variant(text: str) -> Variant:
    """Parses the name of a variant. Raises ValueError for a text that is none."""
    parts = text.split("|")
    if text and ("/" not in text or len(parts) > 1) and len(parts) <= 3:
        return CallVariant(*parts)
    match text.split("/"):
        case [("fwd" | "bwd") as direction, ("causal" | "full" | "masked") as mask, dtype, head] if head[:1] == "d":
            own, _, values = head[1:].partition("v")
            is_causal, is_masked = mask == "causal", mask == "masked"
            return AttentionVariant(direction, is_causal, dtype, int(own), int(values or 0), is_masked)
        case [("fwd" | "bwd" | "dgrad" | "wgrad") as direction, dtype, layout, form]:
            return ConvVariant(direction, dtype, layout, form)
        case [("fwd" | "dgrad" | "wgrad") as direction, dtype, layout, form, ("direct" | "converted") as algorithm]:
            return ConvVariant(direction, dtype, layout, form, algorithm)
        case [("batched" | "grouped" | "few" | "rows") as form, layout, dtype]:
            return GemmVariant(layout, dtype, form)
        case [("batched" | "grouped" | "few" | "rows") as form, layout, dtype, "unaligned"]:
            return GemmVariant(layout, dtype, form, is_aligned=False)
        case [layout, dtype]:
            return GemmVariant(layout, dtype)
        case [layout, dtype, "unaligned"]:
            return GemmVariant(layout, dtype, is_aligned=False)
    raise ValueError(f"{text!r} is no variant of a kernel: as nt/bf16, fwd/causal/bf16/d128 or add|fp32>fp32|a>a")
