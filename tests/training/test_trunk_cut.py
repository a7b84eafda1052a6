"""Where a model may be cut, and whether rows may be kept: everything that must be seen before a cache is trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zoo
from inlay.anatomy import anatomy, head_modules
from inlay.errors import InlayError
from inlay.methods.attach import attach
from inlay.methods.tuner import ChildLayer
from inlay.training.batches import Placement
from inlay.training.evaluation import Validation
from inlay.training.trunk.cut import TrunkCache
from inlay.training.trunk.data import KeptSplit, NotKept

FAMILIES = ("vit", "resnet", "swin", "convnext", "dinov2", "clip")


def adapted(family: str, method: str, **settings: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model, batch = zoo.tiny(family)
    return attach(model, method, settings=settings, newly_initialised=head_modules(model)), batch


def test_dropout_before_the_first_trained_part_leaves_no_cut() -> None:
    model, batch = adapted("vit", "norm", layers=[3])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    assert TrunkCache.find(model.eval(), batch)
    state = torch.random.get_rng_state()
    trunk = TrunkCache.find(model.train(), batch)
    assert not trunk
    assert "random numbers" in str(trunk.reason)
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(InlayError, match="no trunk to keep: random numbers"):
        trunk.compute(batch)


def test_statistics_that_move_leave_no_cut_and_are_put_back() -> None:
    model, batch = adapted("resnet", "linear-probe")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    assert "statistics move" in str(TrunkCache.find(model, batch).reason)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_head_that_reads_several_hidden_states_moves_the_cut_or_leaves_none() -> None:
    class Reads(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.head = base, nn.Linear(16, 3)

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            states = self.base(pixel_values, output_hidden_states=True).hidden_states
            return self.head(states[1][:, 0] + states[-1][:, 0])

    base, batch = zoo.tiny("vit", "base")
    model = Reads(base.requires_grad_(False))
    trunk = TrunkCache.find(model, batch)
    assert trunk.blocks_skipped == 3, "the sum of both enters the head"
    base.layers[2].requires_grad_(True)
    assert "cannot be cut off" in str(TrunkCache.find(model, batch).reason), "block 1 is read beside block 3's input"


class Routed(nn.Module):
    """A frozen route, of integers or booleans, is chosen early and read late, or not at all."""

    def __init__(self, choose: Callable[[torch.Tensor], Any], *, as_module: bool, used: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.choose = Chooses(choose) if as_module else choose
        self.used = used
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.first(x)
        route = self.choose(early)
        late = self.head(self.second(early))
        return late * (1 + route[:, None]) if self.used else late


class Chooses(nn.Module):
    def __init__(self, choose: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, x: torch.Tensor) -> Any:
        return self.choose(x)


ROUTES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "integer": lambda x: (x.sum(-1) > 0).long(),
    "boolean": lambda x: x.sum(-1) > 0,
    "third": lambda x: (x.sum(-1) > 0).long() * 3 // 2 * 3,  # neither 0 nor 1
    "argmax": lambda x: torch.stack([x.sum(-1), -x.sum(-1)], -1).argmax(-1),
}


@pytest.mark.parametrize("as_module", [True, False], ids=["module", "inline"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_route_that_passes_the_cut_by_is_seen_whatever_the_rows_say(route: str, as_module: bool) -> None:
    """Two rows for which it is 0, as integers have no NaN and NaN is greater than nothing: placeholders would fit."""
    torch.manual_seed(0)
    model = Routed(ROUTES[route], as_module=as_module, used=True)
    x = torch.randn(32, 4)
    x = x[ROUTES[route](model.first(x)) == 0]
    assert len(x) > 2
    trunk = TrunkCache.find(model, {"x": x})
    if trunk:  # a cut before the route is chosen, or where everything is together
        more = torch.randn(32, 4)
        expected = model(more)
        with trunk.replay(trunk.compute({"x": more})):
            assert torch.equal(model(**trunk.placeholders(32)), expected)
    else:
        assert "more than one of its results is used later" in str(trunk.reason)
    assert TrunkCache.find(Routed(ROUTES[route], as_module=as_module, used=False), {"x": x}), "nobody reads it"


def test_a_value_that_python_reads_is_seen() -> None:
    torch.manual_seed(0)
    model = Routed(lambda x: torch.tensor([3.0 if (x > 9).any() else 0.0]), as_module=False, used=True)
    assert not TrunkCache.find(model, {"x": torch.randn(2, 4)})


def test_what_a_module_remembers_of_its_last_pass_is_no_result_of_the_replay() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
            self.body.requires_grad_(False)
            self.early: list[torch.Tensor] = []
            self.body[0].register_forward_hook(lambda module, args, output: self.early.append(output))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x)) + self.early[-1]

    assert not TrunkCache.find(Remembers(), {"x": torch.randn(2, 4)})


def test_a_model_that_checks_its_values_is_no_reason_to_fail() -> None:
    def check(module: nn.Module, args: Any) -> None:
        assert torch.isfinite(args[0]).all(), "not finite"

    model, batch = adapted("vit", "norm", layers=[3])
    anatomy(model).blocks[1].module.register_forward_pre_hook(check)
    assert TrunkCache.find(model, batch).blocks_skipped == 1, "the check is behind the cut"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_leaves_no_trace(family: str) -> None:
    """Nor does one that fails; and what other methods hang on modules works on inside."""
    model, batch = adapted(family, "norm", layers=[2, 3])
    model = attach(model, "activation-prompt", adapter_name="second", settings={"layers": [3], "image_size": 32})
    for module in model.modules():
        if isinstance(module, ChildLayer):
            module.set_adapter(["default", "second"])
    forwards = {module: module.__dict__.get("forward") for module in model.modules()}
    hooks = {module: len(module._forward_pre_hooks) for module in model.modules()}
    expected = model(**batch)
    trunk = TrunkCache.find(model, batch)
    assert trunk.blocks_skipped == 1, trunk.reason
    rows = trunk.compute(batch)
    with trunk.replay(rows):
        found = model(**trunk.placeholders(3), labels=batch["labels"])
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    with pytest.raises(RuntimeError, match="inside"), trunk.replay(rows):
        raise RuntimeError("inside")
    assert {module: module.__dict__.get("forward") for module in model.modules()} == forwards
    assert {module: len(module._forward_pre_hooks) for module in model.modules()} == hooks
    assert torch.equal(model(**batch).logits, expected.logits)


# ---- rows that may be kept


def kept(model: nn.Module, rows: list[dict[str, Any]], batch: int) -> KeptSplit:
    trunk = TrunkCache.find(model, toys.collate(rows[:2]))
    assert trunk, trunk.reason
    split = KeptSplit(rows, toys.collate, trunk, batch, torch.device("cpu"), shuffled=True)
    split.fill(None, lambda: None)
    return split


@given(count=st.integers(2, 12), batch=st.integers(2, 12), exact=st.booleans())
@settings(deadline=None, max_examples=25)
def test_dependence_is_seen_whatever_the_sizes_and_the_order(count: int, batch: int, exact: bool) -> None:
    """An epoch in the very order in which the rows were computed shows nothing; one batch of other company does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    model[:2].requires_grad_(False)
    rows = [{"input": row} for row in torch.randn(count, 4)]
    split = kept(model, rows, batch)
    with pytest.raises(NotKept, match="the rest of its batch"):
        split.check(range(count), lambda: None, to_the_bit=exact)


def test_dependence_on_the_size_of_the_batch_is_seen_where_kept_rows_serve_the_last_one() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / len(x)

    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), Mean(), nn.Linear(4, 2))
    split = kept(model, [{"input": row} for row in torch.randn(10, 4)], 4)
    split.check(range(10), lambda: None, to_the_bit=True)  # on a CPU the last two rows are computed anew
    split.exact = False  # as on an accelerator
    with pytest.raises(NotKept, match="the rest of its batch"):
        split.check(range(10), lambda: None, to_the_bit=False)
    split.check(range(8), lambda: None, to_the_bit=False)


@pytest.mark.parametrize("in_eval_mode", ["the same", "an earlier state", "another way"])
def test_validation_is_not_scored_from_a_cut_that_holds_in_training_alone(in_eval_mode: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head, self.aid = (nn.Linear(4, size) for size in (4, 4, 3, 3))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            early = self.first(x)
            logits = self.aid(early)
            if self.training or in_eval_mode != "another way":
                late = self.head(self.second(early))
                logits = late if self.training or in_eval_mode == "the same" else logits + late
            return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}

    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    model.head.requires_grad_(True)
    rows = [{"x": row, "labels": number % 3} for number, row in enumerate(torch.randn(10, 4))]
    place = Placement(torch.device("cpu"), None, 4)
    validation = Validation(model, toys.image_task(), rows, toys.collate, place)
    expected = validation(lambda: None)
    validation.trunk = TrunkCache.find(model.train(), toys.collate(rows[:2]))
    assert validation.trunk
    for _ in range(2):
        found = validation(lambda: None)
        assert found.metrics == expected.metrics
        assert (found.predictions == expected.predictions).all()
        assert (found.seconds is None) == (in_eval_mode == "the same"), "whether it was scored from kept rows"
