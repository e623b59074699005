"""Lists the products that the table of matmul configurations is tuned and benchmarked on."""

from __future__ import annotations

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
