"""Section 4: a standard transformer of four layers, trained on the same prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.papers.icl.theory import ridge
from inlay.papers.icl.theory.descent import EPOCH, RATE, Batches, Trace, Watch
from inlay.papers.icl.theory.problem import DrawnPrompts, InContextProblem

LAYERS, D_MODEL, D_FF = 4, 256, 512


class DeepTransformer(nn.Module):
    """An encoder as in Vaswani et al. over the K columns of `E = (EP, EQ)` (2, 4), with one number out for each.

    The columns are `(v_k, y_k)` for the prompt and `(v_k, 0)` for the others. A linear map takes them to `d_model`, and
    one takes the last layer to `yhat_k`. What the paper leaves open: no dropout (each prompt is new), and no positions
    (a token is known by its vector).
    """

    tokens: Tensor

    def __init__(
        self,
        problem: InContextProblem,
        heads: int = 8,
        *,
        layers: int = LAYERS,
        d_model: int = D_MODEL,
        d_ff: int = D_FF,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if heads < 1 or d_model % heads:
            raise InlayError(f"{heads} heads, d_model = {d_model}: the heads must divide d_model. Take 1, 2, 4, 8, ...")
        if layers < 1 or d_ff < 1:
            raise InlayError(f"{layers} layers, d_ff = {d_ff}: give whole numbers from 1 on.")
        self.problem = problem
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Linear(problem.d + 1, d_model)
            layer = nn.TransformerEncoderLayer(d_model, heads, d_ff, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            # The encoder's layers are copies of one: each gets a start of its own.
            for parameter in self.encoder.parameters():
                if parameter.ndim > 1:
                    nn.init.xavier_uniform_(parameter)
            self.head = nn.Linear(d_model, 1)
        self.register_buffer("tokens", problem.tokens.to(torch.float32), persistent=False)
        self.to(problem.tokens.device)

    def forward(self, shown: Tensor) -> Tensor:
        """From the labels in the prompts (B, N) to the predictions (B, K)."""
        labels = nn.functional.pad(shown.to(self.tokens), (0, self.problem.K - self.problem.N))
        known = self.tokens.expand(len(shown), *self.tokens.shape)
        return self.head(self.encoder(self.embed(torch.cat([known, labels[..., None]], -1))))[..., 0]


def train_deep(
    model: DeepTransformer,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    rate: float = RATE,
    batches: Batches | None = None,
    every: int = EPOCH,
    tests: Mapping[str, DrawnPrompts] | None = None,
    watch: Watch | None = None,
) -> Trace:
    """Adam on mini-batches until `steps` or `seconds` are over; testing does not count as time.

    The loss kept is the mean over the mini-batches since the last one that was kept. On a GPU matrices are multiplied
    in TF32.
    """
    if (steps is None or steps < 1) and (seconds is None or seconds <= 0):
        raise InlayError(f"{steps} steps, {seconds} seconds: give one of them, above 0.")
    batches = batches or Batches()
    problem = model.problem
    drawn = problem.prompts(batches.samples, batches.seed + 10_000).y.to(model.tokens)
    star = ridge.star(problem).to(model.tokens)
    order = batches.order()
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    trace = Trace(problem.infimum())
    since: list[Tensor] = []
    spent, t = 0.0, 0
    if seconds is not None:
        # The first pass loads what the device needs; the clock is to see training alone.
        model(drawn[: batches.size, : problem.N]).mean().backward()
        model.zero_grad(set_to_none=True)
    while True:
        begun = time.perf_counter()
        y = drawn[next(order).to(drawn.device)]
        with tensor_float(model.tokens.is_cuda):
            loss = (model(y[:, : problem.N]) - y).square().mean() / 2
        since.append(loss.detach())
        # What is kept at a step belongs to the weights before it, as in `train`.
        first = t == 0
        over = not first and ((steps is not None and t >= steps) or (seconds is not None and spent >= seconds))
        if t % every == 0 or over:
            mean = float(torch.stack(since).mean())
            away = time.perf_counter()
            trace.note(t, mean, mean - trace.infimum, _inference(model, star, tests or {}), seconds=spent)
            since = []
            if watch:
                watch(trace)
            begun += time.perf_counter() - away
        if over:
            return trace
        optimiser.zero_grad(set_to_none=True)
        with tensor_float(model.tokens.is_cuda):
            loss.backward()
        optimiser.step()
        if model.tokens.is_cuda and seconds is not None:
            torch.cuda.synchronize()
        spent += time.perf_counter() - begun
        t += 1


@contextmanager
def tensor_float(wanted: bool) -> Iterator[None]:
    """Within this, where wanted, float32 matrices are multiplied in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if wanted else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def _inference(model: DeepTransformer, star: Tensor, tests: Mapping[str, DrawnPrompts]) -> dict[str, float]:
    """`1/K |yhat - y*|^2`, the mean over each test set."""
    found = {}
    for name, test in tests.items():
        shown = test.shown.to(model.tokens)
        found[name] = float((model(shown) - shown @ star).square().mean())
    return found
