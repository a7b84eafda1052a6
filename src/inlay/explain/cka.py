"""Linear centred kernel alignment between two sets of layers, unbiased and accumulated over minibatches.

Kornblith et al., ICML 2019 (https://arxiv.org/abs/1905.00414) for CKA; Song et al., JMLR 2012, for the unbiased
estimator of HSIC; Nguyen et al., ICLR 2021 (https://arxiv.org/abs/2010.15327), for its sum over minibatches. The
biased estimator calls wide layers alike even when they have nothing to do with each other; this one does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.errors import InlayError

SMALLEST = 4  # rows of a minibatch: the estimator divides by n - 3


def hsic1(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741 - the paper's letters
    """The unbiased estimate of HSIC for every pair of Gram matrices: k is (a, n, n), l is (b, n, n), the result (a, b).

        HSIC_1(K, L) = 1 / (n (n - 3)) [ tr(K~ L~) + (1'K~1) (1'L~1) / ((n - 1)(n - 2)) - 2/(n - 2) 1'K~L~1 ],

    where K~ and L~ are K and L with zeros on the diagonal. Gram matrices are symmetric, so the trace is the sum over
    all entries of the elementwise product.
    """
    n = k.shape[-1]
    if n < SMALLEST:
        raise InlayError(f"The unbiased HSIC needs {SMALLEST} examples in a minibatch, and there are {n}. Give more.")
    off = 1 - torch.eye(n, dtype=k.dtype, device=k.device)
    k, l = k * off, l * off  # noqa: E741
    rows_k, rows_l = k.sum(-1), l.sum(-1)
    trace = k.flatten(1) @ l.flatten(1).T
    sums = torch.outer(rows_k.sum(-1), rows_l.sum(-1)) / ((n - 1) * (n - 2))
    return (trace + sums - 2 / (n - 2) * (rows_k @ rows_l.T)) / (n * (n - 3))


class MinibatchCKA:
    """CKA of every layer of one model with every layer of another, from the Gram matrices of minibatches:

        CKA = sum_b HSIC_1(K_b, L_b) / sqrt( sum_b HSIC_1(K_b, K_b) * sum_b HSIC_1(L_b, L_b) ).

    Minibatches count by their size, which leaves each sum unbiased where the sizes differ by one. Only three small
    tables are kept, however many examples go by.
    """

    def __init__(self) -> None:
        self._both: Tensor | None = None
        self._first: Tensor | None = None
        self._second: Tensor | None = None

    def update(self, k: Tensor, l: Tensor) -> None:  # noqa: E741
        """Add a minibatch: Gram matrices (a, n, n) of the one model's layers and (b, n, n) of the other's."""
        n = k.shape[-1]
        # HSIC_1(K, K) is an inner product of a matrix with itself: never negative, and 0 for constant features only.
        own_k = torch.stack([hsic1(one[None], one[None])[0, 0] for one in k])
        own_l = torch.stack([hsic1(one[None], one[None])[0, 0] for one in l])
        found = [n * value for value in (hsic1(k, l), own_k, own_l)]
        kept = (self._both, self._first, self._second)
        self._both, self._first, self._second = (
            new if old is None else old + new for old, new in zip(kept, found, strict=True)
        )

    def value(self) -> Tensor:
        """The table of CKA, (a, b); not a number for a layer that says the same of every example."""
        if self._both is None or self._first is None or self._second is None:
            raise InlayError("No minibatch was given: there is nothing to compare.")
        scale = torch.sqrt(torch.outer(self._first, self._second))
        return torch.where(scale > 0, self._both / scale, torch.nan)
