"""What is checked of the CUDA backend on a GPU; test_cuda.py runs it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from cuda_cases import BOUND, DEVICE, Case, close, compare, definition, elu_features, handed_over, rms
from torch import Tensor

from inlay.attention import attention_with_lse, feature_map, ntk_attention, prefix_attention
from inlay.attention.join import finite, mix, weigh
from inlay.attention.term import SHORT

ON_GPU = torch.cuda.is_available()
BACKENDS = ("cuda", "plain")


def check_lse(case: Case, backend: str) -> None:
    true = {name: x.requires_grad_() for name, x in case.tensors().items()}
    mine = handed_over(case, true)
    found = attention_with_lse(**mine, attn_mask=case.masking(), is_causal=case.causal, backend=backend)
    assert found[0].dtype == case.dtype
    compare(case, list(found), list(definition(true, case, case.size**-0.5)), mine, true)


def check_ntk(case: Case, backend: str) -> None:
    true = {name: x.requires_grad_() for name, x in case.tensors().items()}
    state = {name: x.requires_grad_() for name, x in case.state().items()}
    mine = handed_over(case, true)
    small = handed_over(case, state, ("left", "right", "kappa"))
    scale = 0.15
    z = (small["left"], small["right"]) if "right" in small else small["left"]
    options = {"scale": scale, "attn_mask": case.masking(), "is_causal": case.causal}
    found = ntk_attention(**mine, Z=z, kappa=small["kappa"], backend=backend, **options)
    assert found.dtype == case.dtype
    right, _ = definition(true, case, scale, state)
    compare(case, [found], [right], mine | small, true | state)


def check_decoding(case: Case) -> None:
    """A few queries without gradients; where there is no GPU, by the interpreted kernels."""
    from inlay.attention import decode

    state = case.state()
    mine = {name: x.detach() for name, x in handed_over(case, case.tensors()).items()}
    small = {name: x.float() for name, x in state.items()}
    z = (small["left"], small["right"]) if "right" in small else small["left"]
    found = _decoded(case, mine, z, small["kappa"], 0.15)
    assert found.dtype == case.dtype
    assert decode.takes(*mine.values())
    if ON_GPU:  # launched directly from the second call on
        assert torch.equal(found, _decoded(case, mine, z, small["kappa"], 0.15))
    right, _ = definition(case.tensors(), case, 0.15, state)
    close("value", found, right, BOUND[case.dtype])


def _decoded(
    case: Case, mine: dict[str, Tensor], z: Any, kappa: Tensor, scale: float = 0.125, signed: bool = False
) -> Tensor:
    with torch.no_grad():
        if ON_GPU:
            options = {"attn_mask": case.masking(), "is_causal": case.causal, "signed": signed, "backend": "cuda"}
            return ntk_attention(**mine, Z=z, kappa=kappa, scale=scale, **options)
        from inlay.attention import decode

        left, right = (z, None) if isinstance(z, Tensor) else z
        return decode.forward(*mine.values(), case.masking(), case.causal, scale, left, right, kappa, signed)


def check_decoding_layouts(dtype: torch.dtype) -> None:
    """Keys in a cache longer than what is used of it, a head of keys for many, queries of a packed projection, odd
    strides, pointers that are not multiples of 16, and rho in place of kappa: the same as of copies."""
    torch.manual_seed(0)
    case = Case(dtype, length=2, keys=50, groups=2, mask="left")
    small = {name: x.float() for name, x in case.state().items()}
    rho = small["kappa"] * torch.where(torch.rand(small["kappa"].shape) > 0.5, 1.0, -1.0).to(DEVICE)
    z = small["left"], small["right"]

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype).to(DEVICE)

    queries = {
        "packed": made(2, 2, 3, 4, 64).permute(2, 0, 3, 1, 4)[0],
        "odd": made(2, 4, 2, 67)[..., 1:65],
        "repeated": made(1, 4, 2, 64).expand(2, 4, 2, 64),
    }
    caches = {"slice": made(2, 2, 2, 90, 64)[:, :, :, 7:57], "one head": made(2, 2, 1, 50, 64).expand(2, 2, 2, 50, 64)}
    for query in queries.values():
        for cache in caches.values():
            given = {"query": query, "key": cache[0], "value": cache[1]}
            found = _decoded(case, given, z, rho, signed=True)
            copied = {name: x.contiguous() for name, x in given.items()}
            # Sums over what was loaded in other portions: in another order.
            again = _decoded(case, copied, z, small["kappa"])
            close("copied", found, again.double(), 1e-6 if dtype == torch.float32 else BOUND[dtype] / 4)
            right, _ = definition({n: x.double() for n, x in given.items()}, case, 0.125, case.state())
            close("value", found, right, BOUND[dtype])


def check_decoding_follows() -> None:
    """Nothing is remembered of Z and kappa, whether they are changed in place or exchanged; nor of a cache that
    grows, which compiles nothing anew."""
    from inlay.attention import decode

    case = Case(torch.bfloat16, length=1, keys=20, groups=2)
    mine = {name: x.detach() for name, x in handed_over(case, case.tensors()).items()}
    state = {name: x.float() for name, x in case.state().items()}
    for keys in (20, 19, 3):
        state["left"].mul_(1.5), state["kappa"].add_(0.1)
        state["right"] = state["right"].flip(0)
        shorter = replace(case, keys=keys)
        given = {name: x if name == "query" else x[:, :, :keys] for name, x in mine.items()}
        found = _decoded(shorter, given, (state["left"], state["right"]), state["kappa"])
        truth = {name: x.double() for name, x in given.items()}
        right, _ = definition(truth, shorter, 0.125, {name: x.double() for name, x in state.items()})
        close("value", found, right, BOUND[case.dtype])
        if keys == 20:
            before = decode._launches.cache_info().currsize
    assert decode._launches.cache_info().currsize == before


def check_decoding_compiled(compiler: str) -> None:
    case = Case(torch.bfloat16, length=1, keys=40, groups=2, mask="left")
    mine = {name: x.detach() for name, x in handed_over(case, case.tensors()).items()}
    small = {name: x.float() for name, x in case.state().items()}
    seen = case.masking()

    def run(q: Tensor, k: Tensor, v: Tensor, left: Tensor, right: Tensor, kappa: Tensor) -> Tensor:
        return ntk_attention(q, k, v, (left, right), kappa, attn_mask=seen) * 2

    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(run, backend=compiler, fullgraph=True)(*mine.values(), *small.values())
        close(compiler, found, run(*mine.values(), *small.values()).double(), 1e-2)


def check_decoding_captured() -> None:
    """In a CUDA graph, whose replays see what was changed in place since."""
    case = Case(torch.bfloat16, length=1, keys=300, groups=4, mask="left")
    mine = {name: x.detach() for name, x in handed_over(case, case.tensors()).items()}
    small = {name: x.float() for name, x in case.state().items()}

    def run() -> Tensor:
        with torch.no_grad():
            return ntk_attention(**mine, Z=(small["left"], small["right"]), kappa=small["kappa"], attn_mask=mask)

    mask = case.masking()
    assert mask is not None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(), run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for change in (lambda: None, small["kappa"].zero_, mine["query"].neg_, lambda: mask.fill_(True)):
        change()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, run())


def check_signed(dtype: torch.dtype, backend: str, device: str = "cuda") -> None:
    """rho in place of kappa: as its magnitude; of slope +1 at 0, of either sign."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 20, 64, device=device).to(dtype) for _ in range(3))
    left, right = torch.randn(2, 64, 16, device=device), torch.randn(2, 16, 64, device=device)
    rho = torch.randn(2, 64, device=device)
    rho[:, :2] = torch.tensor([0.0, -0.0])
    sign = torch.where(rho < 0, -1.0, 1.0)
    rho.requires_grad_()
    kappa = rho.detach().abs().requires_grad_()
    results = []
    for given, signed in ((rho, True), (kappa, False)):
        out = ntk_attention(q, k, v, (left, right), given, signed=signed, backend=backend)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), given)))
    assert torch.equal(results[0][0], results[1][0])
    close("rho", results[0][1], (results[1][1] * sign).double(), BOUND[dtype])


def check_prefix(case: Case, backend: str, shared: bool) -> None:
    tensors = case.tensors()
    torch.manual_seed(4)
    for name in ("prefix_key", "prefix_value"):
        made = torch.randn(1 if shared else case.batch, case.kv_heads, 37, case.size)
        tensors[name] = made.to(case.dtype).double().cuda()
    true = {name: x.requires_grad_() for name, x in tensors.items()}
    mine = handed_over(case, true)
    found = prefix_attention(**mine, attn_mask=case.masking(), is_causal=case.causal, backend=backend)
    right, _ = definition(true, case, case.size**-0.5)
    compare(case, [found], [right], mine, true)


def check_identity(dtype: torch.dtype, causal: bool) -> None:
    """With Z = 0 and kappa = 0 the output is the kernel's own, to the bit."""
    case = Case(dtype, causal=causal)
    mine, small = handed_over(case, case.tensors()), handed_over(case, case.state(), ("left", "right", "kappa"))
    zero = torch.zeros_like(small["right"]), torch.zeros_like(small["kappa"])
    found = ntk_attention(**mine, Z=(small["left"], zero[0]), kappa=zero[1], is_causal=causal, backend="cuda")
    assert torch.equal(found, attention_with_lse(**mine, is_causal=causal, backend="cuda")[0])
    with torch.no_grad():
        assert torch.equal(
            found, ntk_attention(**mine, Z=(small["left"], zero[0]), kappa=zero[1], is_causal=causal, backend="cuda")
        )
    theirs = torch.nn.functional.scaled_dot_product_attention(*mine.values(), is_causal=causal)
    close("torch's own", found, theirs.double(), 1e-2)


def check_extremes(dtype: torch.dtype, mask: str) -> None:
    """Logits of +-1e4: one key takes all, or the features do; everything stays finite."""
    case = Case(dtype, mask=mask, causal=mask == "padding")
    tensors = case.tensors()
    for sign in (1, -1):
        far = dict(tensors, query=tensors["query"] * 64, key=sign * tensors["query"] * 32)
        mine, small = handed_over(case, far), handed_over(case, case.state(), ("left", "right", "kappa"))
        options = {"attn_mask": case.masking(), "is_causal": case.causal, "backend": "cuda"}
        z = small["left"], small["right"]
        found = ntk_attention(**mine, Z=z, kappa=small["kappa"], **options)
        right, _ = definition(far, case, case.size**-0.5, {n: x.detach().double() for n, x in small.items()})
        close("value", found, right, 2e-2)
        for name, g in zip(
            (*mine, *small), torch.autograd.grad(found.sum(), [*mine.values(), *small.values()]), strict=True
        ):
            assert g.isfinite().all(), name


def check_layouts(dtype: torch.dtype) -> None:
    """Views that are neither contiguous nor a model's: a packed projection, gaps in the last dimension, a row twice."""
    torch.manual_seed(0)
    case = Case(dtype)
    packed = torch.randn(2, 50, 3, 4, 64, device="cuda").to(dtype)
    views = {"packed": packed.permute(2, 0, 3, 1, 4).unbind(0)}
    views["gaps"] = torch.randn(3, 2, 4, 50, 128, device="cuda").to(dtype)[..., ::2].unbind(0)
    views["repeated"] = torch.randn(3, 1, 4, 50, 64, device="cuda").to(dtype).expand(3, 2, 4, 50, 64).unbind(0)
    state = handed_over(replace(case, kv_heads=4), replace(case, kv_heads=4).state(), ("left", "right", "kappa"))
    for name, (q, k, v) in views.items():
        results = []
        for copied in (False, True):
            leaves = [(x.contiguous() if copied else x).detach().requires_grad_() for x in (q, k, v)]
            out = ntk_attention(*leaves, (state["left"], state["right"]), state["kappa"], backend="cuda")
            results.append([out, *torch.autograd.grad(out.sum(), [*leaves, *state.values()])])  # an expanded gradient
        for found, right in zip(*results, strict=True):
            close(name, found, right.double(), 1e-2 if dtype.itemsize == 2 else 1e-5)


def check_other_maps(kind: str) -> None:
    """The general way on CUDA beside the plain backend."""
    case = Case(torch.float32, causal=True, size=16)
    mine = handed_over(case, case.tensors())
    phi = feature_map(kind)
    torch.manual_seed(0)
    rows = phi.dimension(16)
    z, kappa = torch.randn(2, rows, 16, device="cuda"), 0.05 * torch.rand(2, rows, device="cuda")
    kappa[:, 0] += 3
    z.requires_grad_(), kappa.requires_grad_()
    leaves = [*mine.values(), z, kappa]
    pairs = []
    for backend in BACKENDS:
        out = ntk_attention(**mine, Z=z, kappa=kappa, feature_map=phi, is_causal=True, backend=backend)
        pairs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for found, right in zip(*pairs, strict=True):
        close(kind, found, right.double(), 1e-4)


def check_needs(which: str) -> None:
    """Nothing is computed, nor asked of the kernels, for what needs no gradient."""
    case = Case(torch.bfloat16)
    mine = {name: x.detach() for name, x in handed_over(case, case.tensors()).items()}
    small = {n: x.detach() for n, x in handed_over(case, case.state(), ("left", "right", "kappa")).items()}
    leaves = mine if which == "inputs" else small
    for x in leaves.values():
        x.requires_grad_()
    out = ntk_attention(**mine, Z=(small["left"], small["right"]), kappa=small["kappa"], backend="cuda")
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(out.square().sum(), list(leaves.values())))


def check_launches() -> None:
    """Kernels are launched directly, and the same for pointers that Triton would compile anew for."""
    from inlay.attention import epilogue

    case = Case(torch.bfloat16, causal=True)
    small = handed_over(case, case.state(), ("left", "right", "kappa"))
    mine = handed_over(case, case.tensors())
    odd = {
        n: torch.cat([x.detach().reshape(-1)[:1], x.detach().reshape(-1)])[1:].view(x.shape) for n, x in small.items()
    }
    leaves = [*mine.values()]
    results = []
    for state in (small, small, odd):
        out = ntk_attention(**mine, Z=(state["left"], state["right"]), kappa=state["kappa"], is_causal=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert epilogue.Launch.directly
    assert odd["left"].data_ptr() % 16
    for other in results[1:]:
        for found, right in zip(other, results[0], strict=True):
            close("again", found, right.double(), 1e-2)


def check_deterministic() -> None:
    """The sums over batch and length do not depend on the order in which programs finish."""
    case = Case(torch.bfloat16, batch=4, length=700)
    mine = handed_over(case, case.tensors())
    small = handed_over(case, case.state(), ("left", "right", "kappa"))
    results = []
    for _ in range(10):
        out = ntk_attention(**mine, Z=(small["left"], small["right"]), kappa=small["kappa"], backend="cuda")
        results.append(torch.autograd.grad(out.square().sum(), list(small.values())))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def check_compiled(compiler: str, mask: str) -> None:
    case = Case(torch.bfloat16, causal=mask == "none", groups=2, mask=mask)
    mine, small = handed_over(case, case.tensors()), handed_over(case, case.state(), ("left", "right", "kappa"))
    seen = case.masking()

    def run(*given: Tensor) -> Tensor:
        q, k, v, left, right, kappa = given
        return ntk_attention(q, k, v, (left, right), kappa, attn_mask=seen, is_causal=case.causal)

    leaves = [*mine.values(), *small.values()]
    torch.compiler.reset()
    pairs = []
    for call in (torch.compile(run, backend=compiler, fullgraph=True), run):
        out = call(*leaves)
        pairs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for found, right in zip(*pairs, strict=True):
        close(compiler, found, right.double(), 1e-2)


def check_captured() -> None:
    """Forward and backward inside a CUDA graph."""
    case = Case(torch.bfloat16, causal=True)
    mine, small = handed_over(case, case.tensors()), handed_over(case, case.state(), ("left", "right", "kappa"))
    leaves = [*mine.values(), *small.values()]

    def run() -> list[Tensor]:
        z = small["left"], small["right"]
        out = ntk_attention(**mine, Z=z, kappa=small["kappa"], is_causal=True, backend="cuda")
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        # A graph of autograd that lives on would wait for the stream it was made on.
        return [out.detach(), *grads]

    right = [x.clone() for x in run()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(), run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    torch.cuda.synchronize()
    for f, r in zip(found, right, strict=True):
        close("captured", f, r.double(), 1e-2)


def check_autocast() -> None:
    case = Case(torch.float32)
    mine, small = handed_over(case, case.tensors()), handed_over(case, case.state(), ("left", "right", "kappa"))
    z = small["left"], small["right"]
    with torch.autocast("cuda", torch.bfloat16):
        found = ntk_attention(**mine, Z=z, kappa=small["kappa"])
    assert found.dtype == torch.bfloat16
    rounded = {name: x.detach().bfloat16() for name, x in mine.items()}
    assert torch.equal(found, ntk_attention(**rounded, Z=z, kappa=small["kappa"]))
    assert torch.autograd.grad(found.sum(), small["left"])[0].dtype == torch.float32


def check_chosen() -> None:
    case = Case(torch.bfloat16)
    mine = handed_over(case, case.tensors())
    chosen = attention_with_lse(**mine)[0]
    assert torch.equal(chosen, attention_with_lse(**mine, backend="cuda")[0])
    attention_with_lse(**{n: x.double() for n, x in mine.items()})  # float64 goes to plain


EPILOGUES = [
    (batch, heads, length, size, blocks, rank, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for batch, heads, length, size, blocks, rank in (
        (2, 3, 137, 64, 1, 16),
        (2, 1, 1, 64, 1, 16),
        (1, 2, 33, 36, 1, 16),
        (2, 2, 33, 64, 1, None),
        (1, 2, 40, 64, 3, 5),
    )
    if dtype == torch.bfloat16 or (blocks == 1 and rank is not None)
]


def check_epilogue(
    batch: int, heads: int, length: int, size: int, blocks: int, rank: int | None, dtype: torch.dtype
) -> None:
    """The kernels by themselves, beside join.py in float64: the reference that needs neither a GPU nor Triton."""
    from inlay.attention import epilogue

    torch.manual_seed(0)
    device = "cuda" if ON_GPU else "cpu"

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device)

    q, out, g = (made(batch, length, heads, size).to(dtype).transpose(1, 2) for _ in range(3))
    lse = 3 * made(batch, heads, length)
    lse[0, 0, 0], out[0, 0, 0] = math.nan, math.nan
    lse[-1, -1, -1] = torch.finfo(torch.float32).min  # a mask that adds it: the output is a number
    left = made(heads, blocks * size, rank or size)
    right = None if rank is None else made(heads, rank, size)
    kappa = made(heads, blocks * size).abs()
    seen = out.double().masked_fill(lse.isnan().unsqueeze(-1), 0)
    masked = lse == torch.finfo(torch.float32).min
    found, stats = epilogue.forward(q, out, lse, left, right, kappa, 0.3)
    total, weight = stats[:2]

    true = {"q": q, "left": left, "right": right, "kappa": kappa}
    leaves = {name: x.double().requires_grad_() for name, x in true.items() if x is not None}
    keys = lse.double().masked_fill(lse.isnan(), -math.inf)
    phi = elu_features(leaves["q"], blocks, 0.3)
    z = leaves["left"] @ leaves["right"] if rank is not None else leaves["left"]
    weights = weigh([keys], (phi @ leaves["kappa"].unsqueeze(-1)).squeeze(-1), None)
    right_found = mix([seen], weights, phi @ z, torch.float64)
    close("T", found, right_found, BOUND[dtype])
    close("total", total.masked_fill(masked, 0), finite(weights.total).masked_fill(masked, 0), 1e-5)
    assert weights.feature is not None
    close("weight", weight, weights.feature, 1e-5)

    g = torch.empty_like(found).copy_(g)
    truth = torch.autograd.grad(right_found, list(leaves.values()), g.double())
    g_query = torch.zeros_like(q)
    sums = epilogue.backward(g, q, found, stats, left, right, kappa, 0.3, g_query, True)
    grads = [g_query, *(x for x in sums if x is not None)]
    whole = max(rms(t) for t in truth)
    for name, f, t in zip(leaves, grads, truth, strict=True):
        # Of short queries nothing is rounded but what is given out.
        bound = 1e-4 if length <= SHORT and name != "q" else 2 * BOUND[dtype]
        close(name, f, t, bound, 0.1 * whole)


def check_range_of_half() -> None:
    """float16 holds 65504 at most: where features outweigh the keys by exp(40), T is that and not infinite."""
    from inlay.attention import epilogue

    device = "cuda" if ON_GPU else "cpu"
    q = torch.zeros(1, 1, 4, 64, dtype=torch.float16, device=device)
    z = torch.ones(1, 64, 64, device=device)
    z[..., 0] = -1
    found, _ = epilogue.forward(
        q, q.clone(), torch.full((1, 1, 4), -45.0, device=device), z, None, torch.zeros(1, 64, device=device), 0.3
    )
    assert torch.equal(found, 65504.0 * z[:, None, :4].half())
