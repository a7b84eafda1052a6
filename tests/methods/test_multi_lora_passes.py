"""Multi-LoRA's passes: names that live until the backward pass, whatever recomputes a layer; beams; threads."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn

import inlay
from inlay.errors import InlayError
from inlay.methods.mixture.rows import BACKWARD_PASSES, Routing
from manytasks import gradients, inputs, several, stir
from zoo import tiny

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")

# --------------------------------------------------------------------------------------------------- recomputation


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_checkpointed_passes_before_one_backward_are_not_mixed_up(reentrant: bool) -> None:
    model, batch = several("bert")
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def both() -> dict[str, Tensor]:
        model.zero_grad()
        first = model(**batch, adapter_names=["rte", "sst2", "rte"]).loss
        second = model(**batch, adapter_names=["sst2", "sst2", "rte"]).loss
        model.set_adapter("sst2")
        third = model(**inputs(batch)).logits.sum()
        model.set_adapter("rte")
        (first + 2 * second + third).backward()
        return gradients(model)

    wanted = both()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = both()
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], msg=lambda text, name=name: f"{name}: {text}")


def recomputing(model: Any, reentrant: bool) -> Any:
    """One layer that is recomputed by other means than the model's own."""
    layer = model.get_base_model().bert.encoder.layer[1].attention.self
    forward = layer.forward

    def recomputed(hidden: Tensor, **kwargs: Any) -> Any:
        def run(hidden: Tensor) -> Any:
            return forward(hidden, **kwargs)

        return torch.utils.checkpoint.checkpoint(run, hidden, use_reentrant=reentrant)

    layer.forward = recomputed
    return model


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("names", [["rte", "sst2", "rte"], ["sst2"] * 3, ["rte", "__base__", "rte"]])
def test_a_recomputation_that_lost_the_rows_is_an_error(names: list[str], reentrant: bool) -> None:
    model, batch = several("bert")
    recomputing(model, reentrant)
    out = model(**inputs(batch), adapter_names=names, output_hidden_states=True)
    for found in (out.logits, out.hidden_states[-1]):
        with pytest.raises(InlayError, match="no longer knows which rows"):
            found[:, :1].sum().backward(retain_graph=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_that_lost_nothing_is_none(reentrant: bool) -> None:
    """Mixed rows before, or a pass of which no backward pass is made, are no reason to refuse it."""
    model, batch = several("bert")

    def alone(names: list[str] | None) -> dict[str, Tensor]:
        model.zero_grad()
        model(**inputs(batch), adapter_names=names).logits.square().sum().backward()
        return gradients(model)

    wanted = alone(None)
    model(**batch, adapter_names=["rte", "sst2", "rte"]).loss.backward()
    recomputing(model, reentrant)
    waiting = model(**batch, adapter_names=["rte", "sst2", "rte"]).loss
    for names in (None, ["rte"] * 3):
        found = alone(names)
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], msg=lambda text, name=name: f"{name}: {text}")
    with pytest.raises(InlayError, match="no longer knows which rows"):
        waiting.backward()


def test_another_task_chosen_before_the_recomputation_is_an_error() -> None:
    model, batch = several("bert")
    recomputing(model, reentrant=False)
    loss = model(**batch).loss
    model.set_adapter("sst2")
    with pytest.raises(InlayError, match="there were rte, and now sst2"):
        loss.backward()


# ---------------------------------------------------------------------------------------------------------- beams


@pytest.mark.parametrize("task_type", ["CAUSAL_LM", None])
def test_beams_are_for_generating_and_not_for_a_forward_pass(task_type: str | None) -> None:
    """Many checkpoints ask for several beams in their settings: names that do not match the rows are no beams."""
    model, _ = tiny("gpt2", "causal-lm")
    model.generation_config.num_beams = 3
    model = get_peft_model(model, inlay.MultiLoraConfig(task_type=task_type), adapter_name="e2e").eval()
    model.add_adapter("dart", inlay.MultiLoraConfig(task_type=task_type))
    stir(model)
    ids = torch.randint(5, 20, (6, 4), generator=torch.Generator().manual_seed(0))
    for call in (model, model.generate):
        with pytest.raises(InlayError, match="2 names, and the batch has 6 rows"):
            call(input_ids=ids, adapter_names=["e2e", "dart"])
    how = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    found = model.generate(input_ids=ids[:2], attention_mask=torch.ones(2, 4), adapter_names=["e2e", "dart"], **how)
    for i, name in enumerate(["e2e", "dart"]):
        model.set_adapter(name)
        assert torch.equal(found[[i]], model.generate(input_ids=ids[[i]], attention_mask=torch.ones(1, 4), **how))


# --------------------------------------------------------------------------------------------------------- threads


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns many times in a pass."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(actions: list[Callable[[], Any]], times: int) -> list[list[Any]]:
    """What each action gives, every time, all of them running at once."""
    with ThreadPoolExecutor(len(actions)) as pool:
        started = [pool.submit(lambda act=act: [act() for _ in range(times)]) for act in actions]
        return [each.result() for each in started]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_passes_of_several_threads_do_not_meet(checkpointing: bool) -> None:
    """One of them trains, and the others run the model; the banks are made anew meanwhile."""
    model, batch = several("bert")
    if checkpointing:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.gradient_checkpointing_enable()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    functions = [m._gradient_checkpointing_func for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]

    def run(names: list[str] | None) -> list[Tensor]:
        with torch.no_grad():
            logits: Tensor = model(**inputs(batch), adapter_names=names).logits
        return [logits]

    def train() -> list[Tensor]:
        logits = model(**inputs(batch), adapter_names=["sst2", "rte", "stsb"]).logits
        found = torch.autograd.grad(logits[:, :1].sum(), [*trained.values()], allow_unused=True)
        return [logits.detach(), *(each for each in found if each is not None)]

    actions = [train, *(partial(run, names) for names in (["rte", "sst2", "rte"], None, ["stsb"] * 3))]
    with ThreadPoolExecutor(1) as pool:  # a thread that has ended is in nobody's way
        wanted = [pool.submit(act).result() for act in actions]
    model.add_adapter("new", inlay.MultiLoraConfig(r=3))
    for each, found in zip(wanted, at_once(actions, 8), strict=True):
        for again in found:
            assert len(again) == len(each)
            for mine, its in zip(again, each, strict=True):
                torch.testing.assert_close(mine, its)
    assert functions == [
        m._gradient_checkpointing_func for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")
    ]


@pytest.mark.parametrize("names", [None, ["rte", "sst2", "stsb"]], ids=["one task", "mixed"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "resnet"])
def test_a_second_thread_that_trains_is_refused(family: str, names: list[str] | None) -> None:
    """Also where it runs a part of the model. What runs without gradients is not training, nor is a frozen task."""
    model, batch = several(family)
    rows = {name: value[:3] for name, value in inputs(batch).items()}
    model(**rows, adapter_names=names)  # this thread trains
    for call in (partial(model, **rows, adapter_names=names), partial(model.get_base_model().base_model, **rows)):
        with pytest.raises(InlayError, match=r"one thread at a time trains a model.*torch.no_grad"):
            at_once([call], 1)

    def look() -> Tensor:
        with torch.no_grad():
            return model(**rows, adapter_names=names).logits

    assert torch.equal(at_once([look], 1)[0][0], look())
    model.requires_grad_(False)
    at_once([partial(model, **rows, adapter_names=names)], 1)


@pytest.mark.usefixtures("often")
def test_of_threads_that_begin_at_once_one_trains() -> None:
    routing, begin = Routing(), threading.Barrier(4)

    def claim() -> bool:
        begin.wait()
        try:
            routing.refuse_second_trainer()
        except InlayError:
            return False
        finally:
            begin.wait()
        return True

    assert sorted(each[0] for each in at_once([claim] * 4, 1)) == [False, False, False, True]
    routing.refuse_second_trainer()  # those threads have ended
    assert copy.deepcopy(routing)._trainer is None


def test_what_a_backward_pass_recomputes_may_run_in_a_thread_of_its_own() -> None:
    """On a GPU it does: torch runs the backward pass in a thread for each device."""
    routing, reached = Routing(), []
    routing.refuse_second_trainer()
    y = torch.ones(2, requires_grad=True) * 1
    y.register_hook(lambda _: reached.append(routing.refuse_second_trainer()))
    at_once([y.sum().backward], 1)
    assert reached == [None]
    with pytest.raises(InlayError, match="one thread at a time"):
        at_once([routing.refuse_second_trainer], 1)


@pytest.mark.usefixtures("often")
def test_backward_passes_of_several_threads_are_forgotten_one_at_a_time() -> None:
    class Hesitant(dict[int, Any]):
        def __iter__(self) -> Iterator[int]:
            oldest = next(super().__iter__())
            time.sleep(0.001)  # in which another thread may forget it
            return iter([oldest])

    routing = Routing()
    routing._in_backward = Hesitant()

    def run() -> None:
        x = torch.ones(2, requires_grad=True)
        y = x * 1
        routing.follow([y])
        y.sum().backward()

    at_once([run] * 4, BACKWARD_PASSES)
    assert len(routing._in_backward) == BACKWARD_PASSES
