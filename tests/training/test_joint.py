"""Several tasks in one run: how batches mix them, and that each is trained as it would be alone."""

from __future__ import annotations

import json
import math
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from toys import ToyTask, text_rows

from inlay import InlayError, Spec
from inlay.methods import registry
from inlay.methods.attach import restore, trained_parameters
from inlay.methods.protocol import Method
from inlay.training import FitOptions, fit, mixed_batches
from inlay.training.joint import SeveralTasks, attach_tasks, flatten_metrics, greater_is_better
from inlay.training.mixed_batches import NAMES, JointCollator, JointRows, JointSampler, share_rows
from inlay.training.progress import Interrupted
from inlay.training.trainer import NotFinite
from inlay.workflow.settle import check_together

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
QUIET = FitOptions(progress=False)
SPLITS = ("train", "validation", "test")


@pytest.fixture(params=["multi-lora", "lora"])
def method(request: pytest.FixtureRequest) -> Method:
    return registry.get(request.param)


@dataclass
class Part(ToyTask):
    """A toy task with as many classes as it says."""

    num_labels: int = 3
    saved: dict[str, Any] = field(default_factory=dict)

    def split(self, name: str) -> Any:
        return getattr(self, name)

    def to_json(self) -> dict[str, Any]:
        return self.saved


def part(seed: int, classes: int = 3, train: int = 48) -> Part:
    splits = {
        s: text_rows(n, 10 * seed + i, classes) for i, (s, n) in enumerate([("train", train), ("validation", 24)])
    }
    return Part(num_labels=classes, test=text_rows(24, 10 * seed + 5, classes), **splits)


def values(seed: int, train: int = 48) -> Part:
    task = part(seed, train=train)
    for split in (task.train, task.validation, task.test):
        for row in split:
            row["labels"] = float(row["labels"]) - 1
    task.kind, task.metrics, task.num_labels = "regression", ("mse",), 1
    return task


def three() -> dict[str, Part]:
    return {"rte": part(1), "five": part(2, classes=5, train=24), "stsb": values(3)}


def spec(method: Method, **changes: Any) -> Spec:
    given = {"epochs": 4.0, "batch_size": 12, "learning_rate": 0.02, "evaluations": 2, "settings": {"r": 4}}
    return Spec(model="toy", method=method.name, tasks=("rte", "five", "stsb"), **{**given, **changes})


def backbone() -> Any:
    """In float64: what is added up in another order is still the same to many digits."""
    made = toys.backbone(dropout=0.0)
    made.model.double()
    return made


def run(method: Method, folder: Path, tasks: dict[str, Part] | None = None, **changes: Any) -> Any:
    return fit(backbone(), SeveralTasks(tasks or three()), method, spec(method, **changes), folder, QUIET)


# ------------------------------------------------------------------------------------------------------- the batches


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    temperature=st.sampled_from([1.0, 2.0, 5.0, math.inf]),
    seed=st.integers(0, 9),
)
def test_an_epoch_of_several_tasks(sizes: list[int], temperature: float, seed: int) -> None:
    sampler = JointSampler(sizes, seed, temperature)
    order = list(sampler)
    assert order == list(JointSampler(sizes, seed, temperature))
    owner = [i for i, size in enumerate(sizes) for _ in range(size)]
    drawn = Counter(owner[row] for row in order)
    assert [drawn[i] for i in range(len(sizes))] == share_rows(sizes, temperature)
    assert len(order) >= sum(sizes)
    if temperature == 1.0:
        assert sorted(order) == list(range(sum(sizes)))
    for task, size in enumerate(sizes):  # no row twice before every row of its task has come
        own = Counter(row for row in order if owner[row] == task)
        assert max(own.values()) <= math.ceil(drawn[task] / size)
    if temperature == math.inf:
        assert max(drawn.values()) - min(drawn.values()) <= 1
    sampler.epoch = 1
    if len(set(order)) > 8:
        assert list(sampler) != order


def test_a_temperature_near_nothing_gives_all_to_the_largest() -> None:
    assert share_rows([10, 1000], 1e-3) == [1, 1010]  # at least one each


def test_a_batch_says_whose_rows_it_has() -> None:
    tasks = three()
    rows = JointRows({name: task.train for name, task in tasks.items()})
    assert len(rows) == 120
    batch = JointCollator(toys.collate)([rows[0], rows[50], rows[119]])
    assert batch[NAMES] == ["rte", "five", "stsb"]
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [
        float(tasks[n].train[i]["labels"]) for n, i in (("rte", 0), ("five", 2), ("stsb", 47))
    ]


def test_tasks_that_cannot_be_mixed() -> None:
    with pytest.raises(InlayError, match="at least two"):
        check_together({"rte": part(1)})
    with pytest.raises(InlayError, match="cannot be mixed"):
        check_together({"rte": part(1), "lm": toys.lm_task()})


def test_tasks_share_no_settings_that_can_be_written_to(method: Method) -> None:
    model = attach_tasks(backbone(), three(), method, {"r": 4})
    lists = [config.modules_to_save for config in model.peft_config.values()]
    assert all(len(set(each)) == len(each) for each in lists)
    assert len(set(map(id, lists))) == 3


# ------------------------------------------------------------------------------------------------------ the training


def test_three_tasks_are_learnt_saved_and_loaded(method: Method, tmp_path: Path) -> None:
    tasks = three()
    outcome = run(method, tmp_path, tasks, epochs=10.0)
    test = outcome.metrics["test"]
    assert test["rte/accuracy"] > 0.6
    assert test["five/accuracy"] > 0.4
    assert test["stsb/mse"] < 0.6
    assert test["average"] == pytest.approx((test["rte/accuracy"] + test["five/accuracy"]) / 2)
    assert "the average on test leaves out stsb (mse, of which less is better)" in outcome.notes
    assert (outcome.portrait["parameters"]["shared"] > 0) == (method.name == "multi-lora")
    assert {"rte_loss", "five_loss", "stsb_loss"} <= set(outcome.history[0])
    again: Any = backbone().model
    for name in tasks:
        again = restore(again, method, tmp_path / "adapter", adapter_name=name, fingerprint="f" * 64, mixed=True)
    batch = toys.collate([{k: v for k, v in t.test[0].items() if k != "labels"} for t in tasks.values()])
    with torch.no_grad():
        found = again(**batch, adapter_names=list(tasks)).logits
        assert torch.equal(found, outcome.model(**batch, adapter_names=list(tasks)).logits)


def test_each_lora_is_one_that_peft_loads_by_itself(tmp_path: Path) -> None:
    tasks = three()
    outcome = run(registry.get("lora"), tmp_path, tasks)
    for name, task in tasks.items():
        base = toys.backbone(dropout=0.0, num_labels=task.num_labels).model.double()
        alone = PeftModel.from_pretrained(with_body(base), str(tmp_path / "adapter" / name)).eval()
        batch = toys.collate([{k: v for k, v in row.items() if k != "labels"} for row in task.test])
        with torch.no_grad():
            wanted = outcome.model(**batch, adapter_names=[name] * 24).logits[:, : task.num_labels]
            torch.testing.assert_close(alone(**batch).logits, wanted, atol=1e-12, rtol=1e-12)
        config = json.loads((tmp_path / "adapter" / name / "adapter_config.json").read_text())
        assert config["modules_to_save"] == ["classifier", "score"]
        assert config["r"] == 4


def with_body(model: Any) -> Any:
    """The same model as `backbone`'s but for its head."""
    body = {name: value for name, value in backbone().model.state_dict().items() if "classifier" not in name}
    model.load_state_dict(body, strict=False)
    return model


def test_tasks_are_restored_in_any_order_on_a_base_of_any_head(method: Method, tmp_path: Path) -> None:
    outcome = run(method, tmp_path, tasks := three())
    rows = [{k: v for k, v in t.test[i].items() if k != "labels"} for t in tasks.values() for i in range(3)]
    names = [name for name in tasks for _ in range(3)]
    with torch.no_grad():
        wanted = outcome.model(**toys.collate(rows), adapter_names=names).logits
        for labels in (3, 1):
            model: Any = with_body(toys.backbone(dropout=0.0, num_labels=labels).model.double())
            for name in ("stsb", "five", "rte"):
                how = {"adapter_name": name, "fingerprint": "f" * 64, "mixed": True}
                model = restore(model, method, tmp_path / "adapter", **how)
            assert not trained_parameters(model)
            torch.testing.assert_close(model(**toys.collate(rows), adapter_names=names).logits, wanted)


def test_loras_that_are_trained_together_are_those_of_runs_of_their_own(tmp_path: Path) -> None:
    """Whole runs from one seed, each update on all rows: what each task begins with is the same too."""
    method, tasks = registry.get("lora"), {"rte": part(1), "other": part(2)}
    how = {"epochs": 8.0, "weight_decay": 0.1, "clip": 0.5, "seed": 3}
    both = fit(
        backbone(), SeveralTasks(tasks), method, spec(method, batch_size=96, **how), tmp_path / "both", QUIET
    )  # fmt: skip
    found = dict(both.model.named_parameters())
    for name, task in tasks.items():
        given = spec(method, batch_size=48, **how).with_(tasks=(), task=name)
        alone = fit(backbone(), task, method, given, tmp_path / name, QUIET)  # type: ignore[arg-type]
        assert alone.steps == both.steps == 8
        trained = trained_parameters(alone.model)
        assert any("lora_A" in each for each in trained)
        for each, parameter in trained.items():
            mine = found[each.replace(".default.", f".{name}.")]
            torch.testing.assert_close(mine, parameter, atol=1e-8, rtol=1e-6, msg=lambda text, n=each: f"{n}: {text}")
        assert both.metrics["test"][f"{name}/accuracy"] == alone.metrics["test"]["accuracy"]


def test_a_task_begins_the_same_whichever_others_there_are(method: Method) -> None:
    made = [
        dict(attach_tasks(backbone(), tasks, method, {"r": 4}, seed).named_parameters())
        for tasks, seed in ((three(), 1), ({"rte": part(1), "stsb": values(3)}, 1), (three(), 2))
    ]
    own = [name for name in made[1] if ".stsb." in name]
    assert own
    assert all(torch.equal(made[0][name], made[1][name]) for name in own)
    assert not all(torch.equal(made[0][name], made[2][name]) for name in own)


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"bias": "all"}, {"init_lora_weights": "pissa"}, {"target_parameters": ["x"]}]
)
def test_settings_with_which_loras_cannot_be_trained_together(settings: dict[str, Any]) -> None:
    with pytest.raises(InlayError, match=next(iter(settings)).removeprefix("use_") + r"|DoRA"):
        attach_tasks(backbone(), three(), registry.get("lora"), settings)


def test_language_models_are_trained_together(method: Method, tmp_path: Path) -> None:
    tasks: dict[str, Any] = {}
    for name in ("e2e", "dart"):
        made = toys.lm_task()
        tasks[name] = Part(kind="causal-lm", num_labels=None, **{s: getattr(made, s) for s in SPLITS})  # type: ignore[arg-type]
    model = toys.backbone("gpt2", "causal-lm", dropout=0.0)
    outcome = fit(model, SeveralTasks(tasks), method, spec(method, epochs=3.0), tmp_path, QUIET)
    losses = [entry["loss"] for entry in outcome.history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert outcome.metrics["test"]["e2e/loss"] > 0


@pytest.mark.parametrize(("accumulation", "cost"), [(1, 128), (3, 128), (1, 0)])
def test_each_task_is_trained_as_it_would_be_alone(
    method: Method, accumulation: int, cost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: the same rows in the same order, task by task, each with an AdamW and a clipping of its own.

    At a cost of 0 a batch is run in as many parts as it has lengths.
    """
    monkeypatch.setitem(mixed_batches.PASS, "cpu", cost)
    tasks, given = three(), spec(method, weight_decay=0.1, clip=0.5, epochs=2.0, gradient_accumulation=accumulation)
    outcome = fit(backbone(), SeveralTasks(tasks), method, given, tmp_path, QUIET)
    rows = JointRows({name: task.train for name, task in tasks.items()})
    sampler = JointSampler(rows.sizes, 0)
    order = []
    for epoch in range(2):
        sampler.epoch = epoch
        order += [list(sampler)[i : i + 12] for i in range(0, len(rows), 12)]
    torch.manual_seed(0)
    total, warmup = len(order), math.ceil(0.06 * len(order))
    for task in tasks:
        model = attach_tasks(backbone(), tasks, method, {"r": 4}).eval()
        wanted = {name: p for name, p in trained_parameters(model).items() if f".{task}." in name}
        biases = [p for name, p in wanted.items() if name.endswith("bias")]  # the Trainer does not let them decay
        rest = [p for name, p in wanted.items() if not name.endswith("bias")]
        optimizer = torch.optim.AdamW([{"params": rest}, {"params": biases, "weight_decay": 0.0}], weight_decay=0.1)
        for step, chosen in enumerate(order):
            mine = [rows[i] for i in chosen if rows[i][NAMES] == task]
            share = (step + 1) / (warmup + 1) if step < warmup else (total - step) / (total - warmup)
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * share
            if mine:
                batch = JointCollator(toys.collate)(mine)
                model(**batch).loss.backward()
                torch.nn.utils.clip_grad_norm_(wanted.values(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        found = dict(outcome.model.named_parameters())
        for name, parameter in wanted.items():
            torch.testing.assert_close(found[name], parameter, atol=1e-8, rtol=1e-6)


def test_a_task_that_fails_does_not_harm_the_others(method: Method, tmp_path: Path) -> None:
    good = run(method, tmp_path / "good", early_stopping=None)
    tasks = three()
    for row in tasks["stsb"].train:
        row["labels"] = math.nan
    outcome = run(method, tmp_path / "bad", tasks)
    assert any("stsb failed" in note for note in outcome.notes)
    assert all("rte" not in note for note in outcome.notes)
    wanted = trained_parameters(good.model)
    for name, parameter in trained_parameters(outcome.model).items():
        assert torch.isfinite(parameter).all()
        if ".stsb." not in name:
            torch.testing.assert_close(parameter, wanted[name], atol=1e-8, rtol=1e-6)
    assert outcome.metrics["test"]["rte/accuracy"] == good.metrics["test"]["rte/accuracy"]
    assert all(math.isfinite(entry["loss"]) for entry in outcome.history if "loss" in entry)


@pytest.mark.parametrize("patience", [None, 5])
def test_a_task_whose_own_parameters_give_no_numbers_says_so(
    method: Method, patience: int | None, tmp_path: Path
) -> None:
    """Found in validation: it returns to its best state, and where none was kept it is not to be used."""

    class Spoils(SeveralTasks):
        def step(self, *args: Any) -> torch.Tensor:
            found = super().step(*args)
            if self.trainer.state.global_step == 21:
                for parameter in self.owned["five"]:
                    parameter.data.fill_(math.nan)
            return found

    given = spec(method, evaluations=4, early_stopping=patience)
    tasks = three()
    outcome = fit(backbone(), Spoils(tasks), method, given, tmp_path, QUIET)
    (note,) = [note for note in outcome.notes if note.startswith("five failed")]
    test = outcome.metrics["test"]
    if patience is None:
        assert note.endswith("its parameters are those that give it: do not use them")
    else:
        assert "its parameters are its best, of step" in note
        assert "five/accuracy" in test
    assert "the average on test leaves out five (failed), stsb (mse, of which less is better)" in outcome.notes
    assert test["average"] == test["rte/accuracy"]
    assert note == f"five failed: {outcome.failed['five']}"
    assert json.loads((tmp_path / "adapter" / "tasks.json").read_text())["failed"] == outcome.failed


def test_of_errors_alone_there_is_a_mean() -> None:
    tasks = {"one": values(1), "two": values(2)}
    assert flatten_metrics({"one": {"mse": 1.0}, "two": {"mse": 2.0}}, tasks)["average"] == 1.5
    assert math.isnan(flatten_metrics({}, tasks)["average"])
    assert not greater_is_better(tasks)
    both = tasks | {"three": part(3)}  # where the accuracy is missing no error stands in for it
    assert math.isnan(flatten_metrics({"one": {"mse": 1.0}}, both)["average"])
    assert greater_is_better(both)


def test_a_class_that_a_task_does_not_have_is_an_error(method: Method, tmp_path: Path) -> None:
    tasks = three()
    tasks["rte"].train[7]["labels"] = 4  # which `five` has
    with pytest.raises(InlayError, match=r"the label 4.0, and its task 'rte' the classes 0 to 2"):
        run(method, tmp_path, tasks)


def test_a_value_that_is_not_known_counts_for_nothing(method: Method, tmp_path: Path) -> None:
    tasks = three()
    for row in tasks["stsb"].train:
        row["labels"] = -100.0
    outcome = run(method, tmp_path, tasks)
    fresh = attach_tasks(backbone(), tasks, method, {"r": 4})
    found = trained_parameters(outcome.model)
    for name, parameter in trained_parameters(fresh).items():
        if "classifier" not in name:
            assert torch.equal(found[name], parameter) == (".stsb." in name), name


def test_when_every_task_fails_the_run_does(method: Method, tmp_path: Path) -> None:
    tasks = {"one": values(1), "two": values(2)}
    for task in tasks.values():
        for row in task.train:
            row["labels"] = math.inf
    with pytest.raises(NotFinite, match="last-good"):
        run(method, tmp_path, tasks)
    assert (tmp_path / "last-good" / "two" / "adapter_config.json").is_file()


def test_each_task_is_evaluated_on_a_part_and_scored_whole(tmp_path: Path) -> None:
    tasks = three()
    tasks["five"].validation = tasks["five"].validation[:5]
    method = registry.get("lora")
    whole = run(method, tmp_path / "whole", tasks, epochs=2.0)
    bounded = run(method, tmp_path / "part", tasks, epochs=2.0, max_eval=7)
    assert bounded.evaluated_rows == {"rte": 7, "stsb": 7}
    assert bounded.metrics == whole.metrics
    last = [[e["validation"] for e in each.history if "validation" in e][-1] for each in (whole, bounded)]
    assert last[0]["five/accuracy"] == last[1]["five/accuracy"]
    assert last[0]["stsb/mse"] != last[1]["stsb/mse"]


def test_each_task_stops_by_its_own_metric(method: Method, tmp_path: Path) -> None:
    tasks = three()
    for row in tasks["five"].validation:  # nothing to be learnt of it: the first evaluation is about the best
        row["labels"] = 4
        row["input_ids"] = [0, 5, 2]
        row["attention_mask"] = [1, 1, 1]
    outcome = run(method, tmp_path, tasks, epochs=12.0, evaluations=12, early_stopping=2)
    ended = {name: note for note in outcome.notes for name in tasks if note.startswith(f"{name} stopped")}
    assert "five" in ended
    best = int(ended["five"].rsplit(" ", 1)[1])
    values_of = [e["validation"]["five/accuracy"] for e in outcome.history if "validation" in e]
    assert outcome.metrics["validation"]["five/accuracy"] == max(values_of[: 12 * best // (12 * 10) + 1])
    assert not list((tmp_path / "checkpoints").glob("task-five-*"))[1:]


def test_interrupted_and_resumed_it_is_the_same_run(method: Method, tmp_path: Path) -> None:
    whole = run(method, tmp_path / "whole", early_stopping=3, evaluations=4)

    class Cut(SeveralTasks):
        """Stops once, in the middle."""

        def step(self, *args: Any) -> torch.Tensor:
            if self.trainer.state.global_step == 17:
                signal.raise_signal(signal.SIGINT)
            return super().step(*args)

    given = spec(method, early_stopping=3, evaluations=4)
    with pytest.raises(Interrupted):
        fit(backbone(), Cut(three()), method, given, tmp_path / "cut", QUIET)
    resumed = run(method, tmp_path / "cut", early_stopping=3, evaluations=4)
    assert resumed.resumed_from == 18
    assert resumed.metrics == whole.metrics
    assert resumed.history == whole.history
    wanted = trained_parameters(whole.model)
    for name, parameter in trained_parameters(resumed.model).items():
        assert torch.equal(parameter, wanted[name]), name


def test_the_trunk_of_several_tasks_is_not_kept(method: Method, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match="trunk_cache='on' cannot be: several tasks are trained"):
        run(method, tmp_path, trunk_cache="on")
