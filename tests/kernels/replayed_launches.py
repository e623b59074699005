"""Replayed launches beside ordinary ones: the same kernels, compiled for sm_90, of the same arguments.

test_launching.py runs it in a process of its own, whose driver notes the calls of Triton's C launcher and makes none.
"""

from __future__ import annotations

import importlib
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import llvm
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from flopcast.kernels import adamw, attention, cross_entropy, matmul, rmsnorm, rope, rotary, rowwise, swiglu
from flopcast.kernels.attention_config import AttentionConfig, Tile
from flopcast.kernels.documents import from_ids

CALLS: list[Any] = []


class Utils:
    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, hash(kernel) & 0xFFFFFFFFFF, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def fill_tma_descriptor(self, pointer: int, *rest: Any) -> Any:
        return "map", pointer, *map(repr, rest)

    fill_tma_descriptor_tiled = fill_tma_descriptor

    def build_signature_metadata(self, signature: Any) -> bytes:
        return str(signature).encode()

    def launch(self, *args: Any) -> None:
        CALLS.append(args)


class Noting:
    """As triton.backends.nvidia's driver, without a device."""

    utils = Utils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Triton's launcher; 3.6 compiles a C function per signature, 3.7 has one for all."""
        module = type("module", (), {"launch": staticmethod(self.utils.launch)})
        held = {name: getattr(nvidia, name) for name in ("compile_module_from_src", "library_dirs")}
        nvidia.compile_module_from_src = lambda **_: module
        nvidia.library_dirs = list
        if hasattr(nvidia, "annotate_arguments"):
            nvidia.PyKernelArg = lambda nested_tuple, type: (nested_tuple, type)
        try:
            return nvidia.CudaLauncher(source, metadata)
        finally:
            for name, value in held.items():
                setattr(nvidia, name, value)


def named(self: CUDABackend, text: str, metadata: dict[str, Any], *_: Any) -> str:
    """The text as it is; the kernel is the one function that a launch may call."""
    (metadata["name"],) = re.findall(r"^define ptx_kernel void @(\w+)\(", text, re.MULTILINE)
    return text


def as_on_a_gpu() -> None:
    """Lets the kernels take CPU tensors, which no kernel touches here."""
    driver.set_active(Noting())
    # LLVM's text of a kernel tells it as well from others as its code would, which takes the rest of the compiler and
    # ptxas two thirds of the time
    llvm.link_extern_libs = llvm.optimize_module = lambda *_: None
    CUDABackend.make_ptx = named
    CUDABackend.make_cubin = lambda self, text, *_: text.encode()
    rowwise._imported.cache_clear()
    rowwise._imported = lambda name: (importlib.import_module(f"flopcast.kernels.triton_{name}"), True)  # type: ignore[assignment]
    for name in ("triton_attention", "triton_matmul"):
        importlib.import_module(f"flopcast.kernels.{name}").interpreted = lambda: True  # type: ignore[attr-defined]


def seen(call: Callable[[], Any], operands: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The launches of a call and its results' kinds, with addresses by whose they are: an operand's or the n-th new."""
    CALLS.clear()
    results = call()
    names: dict[int, str] = {}
    for index, x in enumerate(operands):
        if isinstance(x, Tensor):
            names.setdefault(x.data_ptr(), f"operand {index}")

    def told(value: Any) -> Any:
        if isinstance(value, Tensor):
            return told(value.data_ptr())
        if isinstance(value, tuple | list):
            return [told(x) for x in value]
        if isinstance(value, int) and value > 1 << 24:  # an address: sizes are smaller, heaps may begin below 2**40
            return names.setdefault(value, f"new {len(names)}")
        if not isinstance(value, int | float | str | bytes | bool | None):
            return repr(value) if type(value).__module__.startswith("triton") else type(value).__name__
        return value

    launches = [told(call) for call in CALLS]
    outs = results if isinstance(results, tuple) else (results,)
    return launches, [x if x is None else (tuple(x.shape), x.stride(), x.dtype, told(x.data_ptr())) for x in outs]


def without_hooks(launches: list[Any]) -> list[Any]:
    """Without hooks and what is told to them, which a replay passes as None."""
    return [[None if "HookChain" in str(x)[:80] or "LazyDict" in str(x)[:80] else x for x in one] for one in launches]


def normal(*size: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(size).to(dtype)


def shifted(x: Tensor) -> Tensor:
    """The same numbers two bytes after a multiple of 16."""
    out = torch.empty(x.numel() + 8, dtype=x.dtype)
    skip = next(i for i in range(8) if out[i:].data_ptr() % 16 == 2)
    return out[skip : skip + x.numel()].view(x.shape).copy_(x)


def cases() -> Iterator[tuple[str, Any, list[tuple[Any, ...]]]]:
    """(name, operator, operands of one call after the other)."""
    half, single = torch.float16, torch.float32
    norm: list[tuple[Any, ...]] = []
    for rows, n in ((4, 128), (16, 128), (1, 128), (5, 100), (16, 1)):
        norm.append((normal(rows, n), normal(n), 1e-6, None))
    norm += [
        (normal(4, 128, dtype=single), normal(128, dtype=single), 1e-6, None),
        (shifted(normal(4, 128)), normal(128), 1e-6, None),
        (normal(4, 256)[:, :128], normal(128), 1e-6, None),
        (normal(4, 250)[:, :128], normal(128), 1e-6, None),  # strides that 16 does not divide
        (normal(4, 128), normal(128), 1e-6, single),
        (normal(4, 128), normal(128), 1e-5, None),
        (normal(2, 2, 128), normal(128), 1e-6, None),
        (normal(128, 4).T, normal(128), 1e-6, None),  # copied: never replayed
    ]
    yield "rms_norm", rmsnorm.rms_norm_op, norm
    yield "rms_norm_backward", rmsnorm.rms_norm_backward_op, [
        (normal(*x.shape, dtype=x.dtype), x, w, torch.ones(x.numel() // x.shape[-1]))
        for x, w, _, out in norm
        if out is None
    ]  # fmt: skip
    yield (
        "add_rms_norm",
        rmsnorm.add_rms_norm_op,
        [(x, normal(*x.shape, dtype=x.dtype), w, eps, out) for x, w, eps, out in norm]
        + [(normal(4, 128), normal(4, 128, dtype=single), normal(128), 1e-6, half)],
    )
    yield (
        "add_rms_norm_backward",
        rmsnorm.add_rms_norm_backward_op,
        [
            (normal(4, 128), normal(4, 128), normal(4, 128), normal(128), torch.ones(4), second)
            for second in (None, single)
        ],
    )
    yield "swiglu", swiglu.swiglu_op, [(normal(4, n), normal(4, n)) for n in (128, 1, 33)]
    yield "swiglu_backward", swiglu.swiglu_backward_op, [
        (normal(4, 128), normal(4, 128), normal(4, 128)),
        (normal(1, 128).expand(4, 128), normal(4, 128), normal(4, 128)),
    ]  # fmt: skip
    tables = rope.tables(16, 64, "cpu")
    qkv = normal(2, 16, 8, 64)
    heads = [
        (normal(2, 16, 4, 64), normal(2, 16, 2, 64), normal(64), normal(64), *tables, 1e-6, None),
        (qkv[:, :, :4], qkv[:, :, 4:6], normal(64), normal(64), *tables, 1e-6, None),
        (shifted(normal(2, 16, 4, 64)), normal(2, 16, 2, 64), normal(64), normal(64), *tables, 1e-6, single),
    ]
    yield "rope", rope.rope_qk_norm_op, heads
    yield (
        "rope_backward",
        rope.rope_qk_norm_backward_op,
        [(normal(2, 16, 4, 64), normal(2, 16, 2, 64), *each[:6], 1e-6) for each in heads],
    )
    yield "rotary", rotary.rotary_op, [(*each[:2], *tables, out) for each in heads for out in (None, half)]
    target = torch.randint(0, 512, (8,))
    yield (
        "cross_entropy",
        cross_entropy.cross_entropy_op,
        [(normal(8, n), target, -100, reduction) for n in (512, 500) for reduction in ("mean", "sum")],
    )
    yield "cross_entropy_both", cross_entropy.cross_entropy_with_gradient_op, [
        (normal(8, 512), target, -100, reduction) for reduction in ("mean", "sum")
    ]  # fmt: skip
    scores = (torch.ones(()), normal(8, 512), target, torch.ones(8), torch.ones(1), -100)
    yield "cross_entropy_backward", cross_entropy.cross_entropy_backward_op, [scores]
    pack = normal(1, 128, 8, 64).transpose(1, 2)
    attended: list[tuple[Any, ...]] = [
        (pack[:, :4], pack[:, 4:6], pack[:, 6:], True, 0.125, 0, None),
        (*(normal(1, 128, n, 64).transpose(1, 2) for n in (4, 2, 2)), False, 0.125, 0, None),
        (*(normal(1, n, 40, 64) for n in (4, 2, 2)), True, 0.5, 0, None),
        (pack[:, :4], pack[:, 4:6], pack[:, 6:], True, 0.125, 16, None),
        *((pack[:, :4], pack[:, 4:6], pack[:, 6:], True, 0.125, w, from_ids(torch.zeros(1, 128))) for w in (0, 16)),
    ]
    yield "attention", attention.attention_forward_op, attended
    yield (
        "attention_backward",
        attention.attention_backward_op,
        [
            (normal(*q.shape), q, k, v, normal(*q.shape), torch.ones(q.shape[:3]), *rest, False)
            for q, k, v, *rest in attended
        ],
    )
    products = [
        (normal(128, 64), normal(128, 64), "nt", False), (normal(128, 64), normal(64, 128), "nn", False),
        (normal(64, 128), normal(64, 128), "tn", False), (normal(130, 72), normal(136, 72), "nt", False),
        (normal(128, 50), normal(128, 50), "nt", False),
        (normal(128, 64, dtype=single), normal(128, 64, dtype=single), "nt", True),
    ]  # fmt: skip
    yield "matmul", matmul.matmul_op, products


def left_alive(operator: Any, operands: tuple[Any, ...]) -> list[Any]:
    """The operands and results of a call, replayed from recordings made of it, that are alive when nobody wants them: a
    captured graph's memory must be free then."""
    fresh = [elsewhere(x) for x in operands]
    watched = [weakref.ref(x) for x in fresh if isinstance(x, Tensor) and all(x is not y for y in operands)]
    operator.replayed.plans.clear()
    for _ in range(3):
        results = operator.replayed(*fresh)
        watched += [weakref.ref(x) for x in (results if isinstance(results, tuple) else (results,))]
        del results
    CALLS.clear()
    del fresh
    return [x() for x in watched if x() is not None]


def elsewhere(x: Any) -> Any:
    """A copy with the same strides, of what begins at a multiple of 16 bytes and has no gaps."""
    plain = isinstance(x, Tensor) and x.is_contiguous() and not x.data_ptr() % 16
    return x.clone() if plain else x


def check(name: str, operator: Any, calls: list[tuple[Any, ...]]) -> int:
    """How many calls were replayed, all as the ordinary call is; in one order and then in the other."""
    replayed = operator.replayed
    ordinary = [seen(lambda x=x: replayed.function(*x), x) for x in calls]  # type: ignore[misc]
    count = 0
    for turn in range(4):
        for index in range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls))):
            fresh = tuple(map(elsewhere, calls[index])) if turn == 3 else calls[index]
            launches, results = seen(lambda x=fresh: replayed(*x), fresh)  # type: ignore[misc]
            want, kinds = ordinary[index]
            assert without_hooks(launches) == without_hooks(want), (name, turn, index, launches, want)
            assert str(results) == str(kinds), (name, turn, index, results, kinds)
            count += turn == 3 and getattr(replayed.plans[replayed._key(*fresh)], "source", "") != ""
    return count


def by_descriptors() -> Iterator[tuple[str, Any, list[tuple[Any, ...]]]]:
    """Attention by the Hopper kernels, as on an H200; its tensor-memory descriptors are kept by address."""
    from flopcast.kernels import triton_attention_launch

    tile = Tile(128, 128, 8, 2, kind="hopper", persistent=True)
    tiles = AttentionConfig(replace(tile, num_warps=4), Tile(64, 128, 4, 2, kind="hopper"), replace(tile, num_warps=4))
    attention._chosen = lambda *_: tiles  # type: ignore[assignment]
    triton_attention_launch._multiprocessors = lambda device: 132  # type: ignore[assignment]
    pack = normal(1, 256, 8, 64).transpose(1, 2)
    attended: list[tuple[Any, ...]] = [
        (pack[:, :4], pack[:, 4:6], pack[:, 6:], True, 0.125, 0, None),
        (*(normal(1, 256, n, 64).transpose(1, 2) for n in (4, 2, 2)), True, 0.125, 0, None),
    ]
    backwards = [
        (normal(*q.shape), q, k, v, normal(*q.shape), torch.ones(q.shape[:3]), *rest, False)
        for q, k, v, *rest in attended
    ]
    yield "attention by descriptors", attention.attention_forward_op, attended
    yield "attention backward by descriptors", attention.attention_backward_op, backwards
    one_pass = replace(tiles, dkdv=Tile(64, 128, 4, 2, kind="hopper", l2_mib=32, onepass=True))
    attention._chosen = lambda *_: one_pass  # type: ignore[assignment]
    q, k, v = (normal(2, 384, n, 64).transpose(1, 2) for n in (6, 3, 3))  # of a kind that no call above had
    longer = [(normal(*q.shape), q, k, v, normal(*q.shape), torch.ones(q.shape[:3]), True, 0.125, 0, None, False)]
    yield "attention backward in one pass", attention.attention_backward_op, longer


def optimizer_steps(clip: float) -> list[Any]:
    """The numbers that each of five steps of AdamW hands to its kernel: those of its step, not of the recorded one."""
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = adamw.AdamW([parameter], lr=1e-2, max_norm=clip)
    parameter.grad = torch.ones(64)
    found = []
    for step in range(1, 6):
        optimizer.param_groups[0]["lr"] = 0.01 * step
        CALLS.clear()
        optimizer.step()
        want = adamw.scalars(step, 0.01 * step, 0.9, 0.999, 1e-8, 1e-2)
        numbers = [x for x in flat(CALLS[-1]) if type(x) is float]
        assert numbers == [clip, *want], (step, numbers, want)
        assert parameter._version == step
        found.append(numbers)
    plans = (adamw._launch_clipped if clip else adamw._launch).plans
    assert [hasattr(plan, "source") for plan in plans.values()] == [True]
    return found


def refused_by_another_triton() -> set[str]:
    """Why a call is not replayed by a Triton whose launcher is not known; it runs as written."""
    triton: Any = sys.modules["triton"]
    version, triton.__version__ = triton.__version__, "3.8.0"
    replayed = swiglu.swiglu_op.replayed
    replayed.plans.clear()
    operands = normal(4, 128), normal(4, 128)
    CALLS.clear()
    for _ in range(4):
        replayed(*operands)
    triton.__version__ = version
    assert len(CALLS) == 4
    replayed.plans.clear()
    return {replayed.refused.pop(replayed._key(*operands))}


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for x in value:
            yield from flat(x)
    else:
        yield value


if __name__ == "__main__":
    as_on_a_gpu()
    assert optimizer_steps(0.0) != optimizer_steps(0.5)
    assert "CudaLauncher of triton (3, 8)" in str(refused_by_another_triton())
    for name, operator, calls in chain(cases(), by_descriptors()):
        count = check(name, operator, calls)
        assert not left_alive(operator, calls[0]), name
        why = sorted({text for key, text in operator.replayed.refused.items()})
        print(f"{name}: {count} of {len(calls)} calls replayed {why or ''}", flush=True)
