"""Lists the products that the table of matmul configurations is tuned and benchmarked on, and draws others."""

from __future__ import annotations

import random

from flopcast.kernels.shapes import Gemm

TOKENS = (1024, 2048, 8192, 16384)
WIDTHS = (256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 8192)
VOCABULARY, VOCABULARY_WIDTHS = 151_936, (1024, 2048, 4096)
LAYOUTS = ("nt", "nn", "tn")


def layer(layout: str, tokens: int, n: int, k: int) -> Gemm:
    """One of the three products of a linear layer [k -> n]: forward nt, dgrad nn, wgrad tn."""
    sizes = {"nt": (tokens, n, k), "nn": (tokens, k, n), "tn": (n, k, tokens)}[layout]
    return Gemm(m=sizes[0], n=sizes[1], k=sizes[2], layout=layout)


def grid() -> list[Gemm]:
    """The shapes that are tuned and benchmarked: every token count, width and layout, and the vocabulary."""
    sizes = [nk for w in WIDTHS for nk in ((w, w), (3 * w, w), (w, 3 * w))]
    sizes += [(VOCABULARY, k) for k in VOCABULARY_WIDTHS]
    shapes = [layer(x, t, n, k) for t in TOKENS for n, k in sizes for x in LAYOUTS]
    return list(dict.fromkeys(shapes))


# [k -> n] of the linear layers of Qwen3 0.6B to 32B, Llama 3.2 1B and 3B, Llama 3.1 8B and GPT-2 that `grid` lacks.
MODELS = (
    (512, 2048), (2048, 1024), (8192, 2048), (2048, 8192), (4096, 2560), (2560, 4096), (1024, 2560), (9728, 2560),
    (2560, 9728), (1024, 4096), (14336, 4096), (4096, 14336), (1024, 5120), (17408, 5120), (5120, 17408), (25600, 5120),
    (5120, 25600), (8192, 5120), (5120, 8192), (1024, 3072), (8192, 3072), (3072, 8192), (2304, 768), (768, 768),
    (3072, 768), (768, 3072),
)  # fmt: skip
MODEL_TOKENS = (4096, 8192, 1024, 2048)
LEAST, MOST = 64, 12_288  # of a drawn size


def of_models() -> list[Gemm]:
    """The products of the linear layers of published models that `grid` lacks, token count by token count."""
    found = [layer(x, t, n, k) for t in MODEL_TOKENS for n, k in MODELS for x in LAYOUTS]
    return [shape for shape in dict.fromkeys(found) if shape not in set(grid())]


def drawn(multiple: int, count: int, seed: int) -> list[Gemm]:
    """`count` random products whose sizes are multiples of `multiple` from LEAST to MOST: in half of them each size is
    uniform, in half its logarithm is. Of the layouts each third has one."""
    generator = random.Random(f"{multiple} {seed}")

    def size(is_uniform: bool) -> int:
        x = generator.uniform(LEAST, MOST) if is_uniform else LEAST * (MOST / LEAST) ** generator.random()
        return round(x / multiple) * multiple

    found: dict[Gemm, None] = {}
    while len(found) < count:
        m, n, k = (size(len(found) // 3 % 2 == 0) for _ in range(3))
        found[Gemm(m=m, n=n, k=k, layout=LAYOUTS[len(found) % 3])] = None
    return list(found)
