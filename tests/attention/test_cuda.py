"""The CUDA backend against the definition in float64: values and every gradient; without a GPU, what needs none.

On a machine that has torch and a GPU but no pytest: `python tests/attention/test_cuda.py`, with words of the names of
checks to run those alone. The Triton kernels by themselves also run without a GPU, where Triton is installed, and a
NumPy that its interpreter knows (3.6: before 2.4): `TRITON_INTERPRET=1 pytest tests/attention/test_cuda.py`.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from cuda_cases import CASES, DECODINGS, FP32, Case
from cuda_checks import (
    BACKENDS,
    EPILOGUES,
    ON_GPU,
    check_autocast,
    check_captured,
    check_chosen,
    check_compiled,
    check_decoding,
    check_decoding_captured,
    check_decoding_compiled,
    check_decoding_follows,
    check_decoding_layouts,
    check_deterministic,
    check_epilogue,
    check_extremes,
    check_identity,
    check_launches,
    check_layouts,
    check_lse,
    check_needs,
    check_ntk,
    check_other_maps,
    check_prefix,
    check_range_of_half,
    check_signed,
)
from dropout_checks import (
    CALLS,
    COMPILERS,
    DROPPING,
    check_dropout,
    check_dropout_captured,
    check_dropout_compiled,
    check_dropout_follows_the_seed,
    check_dropout_outside_of_its_context,
    check_the_share_that_is_dropped,
)

from inlay.attention import attention_with_lse, cuda_kernels
from inlay.attention.cuda import TYPES
from inlay.errors import InlayError

try:
    import pytest
except ModuleNotFoundError:
    pytest = None  # type: ignore[assignment]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def gpu_checks() -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
    some = [case for case in CASES if case.dtype == torch.bfloat16 and case.blocks == 1 and case.rank == 16]
    made: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    made += [(check_epilogue, case) for case in EPILOGUES]
    made += [(check, (case, "cuda")) for check in (check_lse, check_ntk) for case in CASES]
    made += [(check, (case, "plain")) for check in (check_lse, check_ntk) for case in CASES[:5]]
    made += [(check_signed, (dtype, backend)) for dtype in (torch.float32, torch.bfloat16) for backend in BACKENDS]
    made += [(check_prefix, (case, "cuda", shared)) for case in (*some[:8], FP32) for shared in (True, False)]
    made += [(check_identity, (dtype, causal)) for dtype in (torch.float32, torch.bfloat16) for causal in (False, True)]
    made += [(check_extremes, (dtype, mask)) for dtype in TYPES for mask in ("none", "padding", "rows")]
    made += [(check_layouts, (dtype,)) for dtype in (torch.float32, torch.bfloat16)]
    made += [(check_other_maps, (kind,)) for kind in ("paper", "taylor", "favor")]
    made += [(check_needs, (which,)) for which in ("inputs", "state")]
    made += [(check_compiled, ("aot_eager", "none")), (check_compiled, ("aot_eager", "rows"))]
    made += [(check_compiled, ("inductor", "padding"))]
    made += [(check_launches, ()), (check_range_of_half, ())]
    made += [(check_decoding, (case,)) for case in DECODINGS]
    made += [(check_decoding_layouts, (dtype,)) for dtype in TYPES]
    made += [(check_decoding_compiled, (compiler,)) for compiler in ("aot_eager", "inductor")]
    made += [(check_decoding_follows, ()), (check_decoding_captured, ())]
    made += [(check_dropout, (case, call, "cuda")) for case in DROPPING for call in CALLS]
    made += [(check_dropout_compiled, (compiler, mask)) for compiler in COMPILERS for mask in ("none", "padding")]
    made += [(check_dropout_outside_of_its_context, ())]
    made += [(check_the_share_that_is_dropped, (call, "cuda")) for call in CALLS]
    made += [(check_dropout_captured, ()), (check_dropout_follows_the_seed, (Case(torch.bfloat16), "cuda"))]
    return [*made, (check_deterministic, ()), (check_captured, ()), (check_autocast, ()), (check_chosen, ())]


def named(check: Callable[..., None], args: tuple[Any, ...]) -> str:
    return f"{check.__name__}{args}".replace("torch.", "")


if pytest is not None:
    CHECKS = gpu_checks()

    @pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
    @pytest.mark.parametrize(("check", "args"), CHECKS, ids=[named(*one) for one in CHECKS])
    def test_on_a_gpu(check: Callable[..., None], args: tuple[Any, ...]) -> None:
        check(*args)

    @pytest.mark.skipif(
        ON_GPU or not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1; on a GPU it runs anyway"
    )
    @pytest.mark.parametrize("args", EPILOGUES, ids=str)
    def test_epilogue_interpreted(args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        from inlay.attention import epilogue

        # The interpreter multiplies the bits of bfloat16 numbers as integers: it is given products of float32.
        full = epilogue.tl.float32
        monkeypatch.setattr(epilogue, "tl", SimpleNamespace(bfloat16=full, float32=full))
        check_epilogue(*args)

    @pytest.fixture
    def products_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
        """The interpreter multiplies the bits of bfloat16 numbers as integers: it is given products of float32."""
        from inlay.attention import decode

        names = {name: getattr(decode.tl, name) for name in ("float32", "float16")}
        monkeypatch.setattr(decode, "tl", SimpleNamespace(bfloat16=decode.tl.float32, **names))
        monkeypatch.setattr(decode, "PROGRAMS", 32)  # as if it were a large GPU

    @pytest.mark.usefixtures("products_of_float32")
    @pytest.mark.skipif(ON_GPU or not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
    @pytest.mark.parametrize("case", DECODINGS, ids=str)
    def test_decoding_interpreted(case: Case) -> None:
        check_decoding(case)

    @pytest.mark.usefixtures("products_of_float32")
    @pytest.mark.skipif(ON_GPU or not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
    def test_decoding_of_any_layout_interpreted() -> None:
        check_decoding_layouts(torch.float32)
        check_decoding_follows()

    @pytest.mark.skipif(ON_GPU or not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
    def test_range_of_half_interpreted() -> None:
        check_range_of_half()

    @pytest.mark.parametrize("kind", ["cudnn", "flash", "efficient"])
    @pytest.mark.parametrize("size", [64, 36])
    def test_each_kernel_takes_what_it_is_handed(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Arguments and shapes, by the kernels' own description for tensors without data."""
        monkeypatch.setattr(cuda_kernels, "kernel_for", lambda *call: kind)
        q, g = (torch.empty(2, 33, 4, size, device="meta", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
        mask = torch.empty(2, 1, 1, 33, device="meta", dtype=torch.bool) if kind == "efficient" else None
        for dropout_p in (0.0, 0.1):
            out, lse, seed, offset = cuda_kernels.attend(q, q, q, mask, False, 0.1, dropout_p)
            assert out.shape == q.shape
            assert lse.shape == q.shape[:3]
            assert (seed is None, offset is None) == (not dropout_p, not dropout_p)
            rest = mask, False, 0.1, dropout_p, seed, offset
            grads = cuda_kernels.attend_backward(g, q, q, q, out, lse, *rest)
            assert [x.shape for x in grads] == [q.shape] * 3

    @pytest.mark.parametrize("kind", ["cudnn", "flash"])
    def test_the_backward_pass_has_the_kernel_of_the_forward_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """With dropout, whatever was switched on or off in between."""
        q = torch.empty(2, 4, 33, 64, device="meta", dtype=torch.bfloat16)
        with monkeypatch.context() as patched:
            patched.setattr(cuda_kernels, "kernel_for", lambda *call: kind)
            _, _, seed, _ = cuda_kernels.attend(q, q, q, None, False, 0.1, 0.2)
        for other in ("cudnn", "flash"):
            monkeypatch.setattr(cuda_kernels, "kernel_for", lambda *call, other=other: other)
            assert cuda_kernels.kernel_of(q, q, None, False, seed) == kind
            assert cuda_kernels.kernel_of(q, q, None, False, None) == other

    @pytest.mark.parametrize("shape", [(1, 1, 1, 33), (2, 1, 7, 33), (1, 4, 7, 48), (2, 1, 1, 48), (2, 4, 7, 1)])
    @pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16])
    def test_a_mask_as_the_kernel_takes_it(shape: tuple[int, ...], kind: torch.dtype) -> None:
        keys = 48 if shape[-1] == 48 else 33
        q, k = torch.empty(2, 4, 7, 8, dtype=torch.bfloat16), torch.empty(2, 4, keys, 8, dtype=torch.bfloat16)
        torch.manual_seed(0)
        mask = torch.rand(shape) > 0.5 if kind == torch.bool else torch.randn(shape).to(kind)
        added = cuda_kernels._added(mask, q, k)
        assert added is not None
        assert added.dtype == q.dtype
        assert added.shape == (2, 4, 7, keys)
        assert all(stride % 16 == 0 for stride in added.stride()[:-1])
        assert added.stride(-1) == 1
        right = torch.zeros(shape).masked_fill(~mask, -math.inf) if kind == torch.bool else mask.to(q.dtype)
        assert torch.equal(added, right.expand(2, 4, 7, keys).to(q.dtype))

    @pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("length", [5, 7, 12])
    @pytest.mark.parametrize("shape", [(2, 1, 1, 7), (1, 3, 1, 7), (2, 1, 0, 7), (1, 3, 0, 7), (2, 3, 0, 1)])
    def test_who_sees_nothing(kind: torch.dtype, causal: bool, length: int, shape: tuple[int, ...]) -> None:
        """Against the scores in full; a bias that the query's type cannot hold hides as -inf does."""
        torch.manual_seed(length)
        mask = torch.rand(shape[0], shape[1], shape[2] or length, shape[3]) > 0.7
        mask[0, 0, 0, : shape[3] // 2] = False
        scores = torch.zeros(2, 3, length, 7).masked_fill(~mask, -math.inf)
        if causal:
            scores = scores.masked_fill(torch.ones(length, 7).triu(1).bool(), -math.inf)
        if kind != torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min).to(kind)
        found = cuda_kernels._sees(mask, torch.empty(2, 3, length, 8, dtype=torch.bfloat16), causal)
        assert torch.equal(found.expand(2, 3, length), scores.amax(-1) > -math.inf)

    @pytest.mark.parametrize("backend", ["cpu", "plain"])
    def test_rho_in_place_of_kappa(backend: str) -> None:
        check_signed(torch.float32, backend, "cpu")

    def test_strides_as_torch_would_choose_them() -> None:
        packed = torch.empty(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)[0]
        for x in (torch.empty(2, 4, 5, 8), torch.empty(2, 5, 4, 8).transpose(1, 2), packed):
            assert tuple(cuda_kernels._strides_like(x)) == torch.empty_like(x).stride()

    def test_ordinary_memory_is_refused() -> None:
        q = torch.randn(1, 1, 2, 8)
        with pytest.raises(InlayError, match="the tensors are on cpu. Backends that can: cpu, plain"):
            attention_with_lse(q, q, q, backend="cuda")


def main() -> None:
    begin, failed = time.perf_counter(), 0
    wanted = sys.argv[1:]
    checks = [one for one in gpu_checks() if not wanted or any(word in named(*one) for word in wanted)]
    for number, (check, args) in enumerate(checks):
        if number % 20 == 0:
            print(
                f"{number:4} of {len(checks)} after {time.perf_counter() - begin:5.1f} s: {named(check, args)}",
                flush=True,
            )
        try:
            check(*args)
            torch.cuda.synchronize()
        except Exception:
            failed += 1
            print(f"FAILED {named(check, args)}", traceback.format_exc(limit=-3), sep="\n", flush=True)
            if failed >= 12:
                break
    print(f"{len(checks)} checks, {failed} failed, {time.perf_counter() - begin:.0f} s, {torch.cuda.get_device_name()}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
