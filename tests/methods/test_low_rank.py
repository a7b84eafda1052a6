"""The kernel that adds each row's own low-rank product, against the definition in float64.

It runs where Triton is installed, and a NumPy that its interpreter knows (3.6: before 2.4):
`TRITON_INTERPRET=1 pytest tests/methods/test_low_rank.py`. On a GPU: multi_lora_cuda_checks.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from low_rank_cases import CASES, Product, check, defined
from multi_lora_cuda_checks import CHECKS, ON_GPU, named
from torch import Tensor

import inlay
from inlay.methods import low_rank
from inlay.methods.low_rank import add_by_slot, fits
from manytasks import inputs, several, stir

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    ON_GPU or not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1; on a GPU it runs anyway"
)


@pytest.fixture
def products_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bfloat16 numbers as integers: it is given products of float32."""
    from inlay.methods.low_rank_kernel import PRODUCTS

    low_rank._launch.cache_clear()
    low_rank._plan.cache_clear()
    monkeypatch.setitem(PRODUCTS, torch.bfloat16, PRODUCTS[torch.float32])


@pytest.mark.usefixtures("products_of_float32")
@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_definition(case: Product) -> None:
    check(case)


@pytest.mark.usefixtures("products_of_float32")
@needs_triton
@pytest.mark.parametrize("programs", [1, 4, 64])
def test_however_it_is_divided(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16, 32 or 64 tokens; all of the output in one program, or every tile of it in one of its own."""
    monkeypatch.setattr(low_rank, "PROGRAMS", programs)
    for tokens, dtype in itertools.product((1, 20, 150), (torch.float32, torch.bfloat16)):
        low_rank._plan.cache_clear()
        check(Product(dtype, shape=(5, tokens), sizes=(160, 600), rank=8))


@pytest.mark.usefixtures("products_of_float32")
@needs_triton
def test_what_is_not_a_number_stays_with_its_token() -> None:
    case = Product(rank=8)
    given = case.tensors()
    plain = case.add(**given)
    for bad in (torch.nan, torch.inf):
        strange = given["x"].clone()
        strange[0, 2], strange[3] = bad, bad
        found = case.add(**given | {"x": strange})
        assert not found[0, 2].isfinite().any()
        found[0, 2] = plain[0, 2]
        assert torch.equal(found, plain), "row 3 has no task"


@pytest.mark.usefixtures("products_of_float32")
@needs_triton
def test_everything_is_read_in_every_call() -> None:
    """A bank that is written to, by whatever means, is what the next call reads."""
    case = Product()
    given = case.tensors()
    case.add(**given)
    given["b"].data.mul_(-2)
    given["a"].data.add_(1)
    given["scales"].data[2] = 9
    given["slots"].data[:] = torch.tensor([1, 1, 3, 2, 0])
    wanted = defined(replace(case, slots=(1, 1, 3, 2, 0)), given)
    torch.testing.assert_close(case.add(**given).double(), wanted, atol=1e-4, rtol=1e-4)


def _nothing(weight: Tensor) -> None:
    pass


def _by_data(weight: Tensor) -> None:
    weight.data.mul_(-2)


def _other_memory(weight: Tensor) -> None:
    weight.data = 3 * weight.data


@pytest.mark.usefixtures("products_of_float32")
@needs_triton
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("names", [["sst2", "rte", "stsb"], ["stsb", "__base__", "__base__"]])
def test_a_mixed_pass_of_a_model(family: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel as by torch's products, whatever was done to the parameters in between."""
    model, batch = several(family, "classification" if family == "bert" else "causal-lm", torch.float32)
    targets = model.peft_config["rte"].target_modules
    model.delete_adapter("sst2")  # now of fewer layers than the others, and of another scale
    fewer = [name for name in targets if ".0." in name]
    model.add_adapter("sst2", inlay.MultiLoraConfig(r=3, target_modules=fewer, lora_alpha=5))
    stir(model)
    calls = 0

    def counted(*given: Any) -> None:
        nonlocal calls
        calls += 1
        add_by_slot(*given)

    changes: list[Callable[[Tensor], None]] = [_nothing, _by_data, _other_memory]
    for change in changes:
        for name, weight in model.named_parameters():
            if "inlay_multi_lora_b" in name:
                change(weight)
        with torch.no_grad(), monkeypatch.context() as patched:
            wanted = model(**inputs(batch), adapter_names=names).logits
            patched.setattr(low_rank, "unwatched", lambda out: True)
            patched.setattr(low_rank, "add_by_slot", counted)
            found = model(**inputs(batch), adapter_names=names).logits
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert calls == len(changes) * len(targets)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("check", "args"), CHECKS, ids=[named(*one) for one in CHECKS])
def test_on_a_gpu(check: Callable[..., None], args: tuple[Any, ...]) -> None:
    check(*args)


def test_what_is_not_for_the_kernel() -> None:
    given = [*Product().tensors().values()][:4]
    assert fits(*given)
    assert not low_rank.unwatched(given[0]), "it is not on a GPU"
    turned = [each.mT.contiguous().mT for each in given]
    others = [
        *((place, given[place].double()) for place in range(4)),
        *((place, turned[place]) for place in range(3)),
        (1, torch.nn.Parameter(given[1])),
        (3, torch.zeros(4, 1, low_rank.MOST_RANK + 1, 40)),
    ]
    for place, other in others:
        assert not fits(*(other if i == place else each for i, each in enumerate(given))), (place, other.shape)
