"""Several tasks from the command line: tune --tasks, predict --adapter, export."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import BertForSequenceClassification, TrainerCallback
from typer.testing import CliRunner

import inlay
from inlay import InlayError, Spec, compare, predict, tune
from inlay.cli.app import app
from inlay.engines.local import LocalEngine
from inlay.records.sealed import checksum
from inlay.records.store import FailedBefore, Run, Store
from inlay.training import Interrupted
from inlay.training.joint import SeveralTasks
from inlay.workflow.answer import Tasks, answer
from inlay.workflow.compare import carry_out, job_of
from inlay.workflow.export import export
from inlay.workflow.sweep import read
from inlay.workflow.tune import identify

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and three tasks in the layout of a data folder: two classes, three, and a value."""
    import zoo
    from checkpoints import write_tokenizer

    place = tmp_path_factory.mktemp("joint")
    zoo.tiny("bert", "base")[0].save_pretrained(place / "model")
    write_tokenizer(place / "model")
    rng = random.Random(0)
    for name, fields, labels in (
        ("cola", ("sentence",), ["unacceptable", "acceptable"]),
        ("cb", ("premise", "hypothesis"), ["entailment", "contradiction", "neutral"]),
        ("stsb", ("sentence1", "sentence2"), None),
    ):
        (place / "data" / name).mkdir(parents=True)
        for split, count in (("train", 24), ("test", 9)):
            rows = []
            for i in range(count):
                kind = i % (len(labels) if labels else 5)
                words = {field: " ".join(f"w{rng.randrange(6, 20)}" for _ in range(4)) for field in fields}
                rows.append(words | {"label": labels[kind] if labels else float(kind)})
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (place / "data" / name / f"{split}.jsonl").write_text(text)
    return place


def spec(folder: Path, **changes: Any) -> Spec:
    given = {"method": "multi-lora", "max_steps": 4, "batch_size": 8, "evaluations": 1, "learning_rate": 0.05}
    return Spec(
        model=str(folder / "model"),
        tasks=("cola", "cb", "stsb"),
        data_dir=str(folder / "data"),
        **{**given, **changes},
    )


@pytest.fixture(scope="module", params=["multi-lora", "lora"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def run(folder: Path, method: str) -> Run:
    return tune(spec(folder, method=method), folder / "runs", progress=False)


def test_one_run_one_record_one_folder(run: Run, folder: Path) -> None:
    assert set(run.record["tasks"]) == {"cola", "cb", "stsb"}
    assert {"cola/matthews", "cb/accuracy", "stsb/pearson", "average"} <= set(run.metrics["test"])
    assert run.record["greater_is_better"] is True
    assert run.record["examples"]["train"] > 50
    kept = sorted(path.name for path in run.adapter.iterdir() if path.is_dir())
    assert kept == ["cb", "cola", "stsb"]
    again = tune(spec(folder, method=run.spec.method), folder / "runs", progress=False)
    assert again.id == run.id
    assert Spec.from_json(run.spec.to_json()) == run.spec


def test_compare_and_sweep_take_several_tasks(folder: Path, tmp_path: Path) -> None:
    """By the average of the tasks' metrics; a method that cannot mix tasks is left out, with the reason."""
    given = spec(folder, learning_rate=None)
    found = compare(given, ["multi-lora", "bias"], 2, tmp_path / "runs", rates=[0.01, 0.05], progress=False)
    assert found.left_out == {"bias": "trains one task at a time"}
    assert found.title == f"cola + cb + stsb on {folder / 'model'}"
    (row,) = found.rows
    assert (row.metric, row.greater_is_better, row.seeds) == ("average", True, (0, 1))
    assert row.values == tuple(run.metrics["test"]["average"] for run in found.runs)
    chosen = [each for each in found.tried if each.chosen]
    assert [each.rate for each in chosen] == [row.rate]
    assert chosen[0].validation == max(each.validation for each in found.tried)
    (tmp_path / "sweep.yaml").write_text(
        f"model: {folder / 'model'}\ntasks: [[cola, cb, stsb], [cola, cb]]\ndata_dir: {folder / 'data'}\n"
        "methods: [multi-lora]\nseeds: 2\nmax_steps: 4\nbatch_size: 8\nevaluations: 1\nlearning_rates: [0.05]\n"
        "sampling: proportional\n"
    )
    plans = read(tmp_path / "sweep.yaml").plan()
    assert [{each.tasks for each in planned.specs} for planned in plans] == [{given.tasks}, {("cola", "cb")}]
    both = carry_out(plans, tmp_path / "runs", progress=False)
    assert {run.id for run in both[0].runs} <= {run.id for run in (*found.runs, *found.others)}, "found, not made again"
    options = ("--model", str(folder / "model"), "--data-dir", str(folder / "data"), "--out", str(tmp_path / "runs"))
    budget = ("--max-steps", "4", "--batch-size", "8", "--evaluations", "1", "--learning-rate", "0.05")
    typed = CliRunner().invoke(
        app, ["compare", *options, *budget, "--tasks", "cola,cb,stsb", "--methods", "multi-lora", "--seeds", "2"]
    )
    assert typed.exit_code == 0, typed.output
    assert "average" in typed.stdout


def test_a_task_that_failed_is_told_of_wherever_the_run_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(objective: SeveralTasks, *args: Any) -> torch.Tensor:
        found = losses(objective, *args)
        return torch.where(torch.arange(len(found)) == objective.names.index("cb"), torch.nan, found)

    losses = SeveralTasks.task_losses
    monkeypatch.setattr(SeveralTasks, "task_losses", spoilt)
    made = tune(spec(folder), tmp_path / "runs", progress=False)
    why = made.record["failed"]["cb"]
    assert list(made.record["failed"]) == ["cb"]
    assert "not a finite number" in why
    test = made.metrics["test"]
    assert test["average"] == pytest.approx((test["cola/matthews"] + test["stsb/pearson"]) / 2)

    def typed(*arguments: str) -> Any:
        found = CliRunner().invoke(app, list(arguments))
        assert found.exit_code == 0, found.output
        return found

    listed = typed("runs", "list", "--out", str(tmp_path / "runs"))
    assert "finished, in part" in listed.stdout
    assert f"{made.id}: cb failed in training" in listed.stderr
    file = tmp_path / "requests.jsonl"
    requests = [{"task": "cola", "sentence": "w6"}, {"task": "cb", "premise": "w9", "hypothesis": "w10"}]
    file.write_text("".join(json.dumps(each) + "\n" for each in requests))
    answered = typed("predict", "--adapter", str(made.folder), str(file))
    assert f"cb failed in training: {why}" in answered.stderr
    cola, cb = (json.loads(line) for line in answered.stdout.splitlines())
    assert "failed_in_training" not in cola
    assert cb["failed_in_training"] == why
    assert cb["label"] in ("entailment", "contradiction", "neutral")
    for form, names in (("lora", "cb"), ("tasks", "cola,cb=bank")):
        place = str(tmp_path / form)
        told = typed("export", "--adapter", str(made.folder), "--task", names, "--to", form, "--output", place)
        assert f"cb failed in training: {why}" in told.stderr
    assert Tasks(tmp_path / "tasks").failed == {"bank": why}


def test_a_folder_from_before_has_no_failed_tasks(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.adapter, tmp_path / "old")
    facts = json.loads((tmp_path / "old" / "tasks.json").read_text())
    assert facts.pop("failed") == {}
    (tmp_path / "old" / "tasks.json").write_text(json.dumps(facts | {"checksum": checksum(facts)}))
    assert Tasks(tmp_path / "old", only=["cola"]).failed == {}
    facts["failed"] = {"rte": "?"}
    (tmp_path / "old" / "tasks.json").write_text(json.dumps(facts | {"checksum": checksum(facts)}))
    with pytest.raises(InlayError, match="failed="):
        Tasks(tmp_path / "old")


def test_a_seed_reaches_every_head_and_no_a(folder: Path, tmp_path: Path) -> None:
    """One update at next to no rate: what is saved is what was drawn."""

    def drawn(place: str, seed: int, tasks: str) -> tuple[dict[str, torch.Tensor], set[str]]:
        given = ["--model", str(folder / "model"), "--data-dir", str(folder / "data"), "--tasks", tasks]
        more = ["--max-steps", "1", "--lr", "1e-12", "--seed", str(seed), "--out", str(tmp_path / place)]
        found = CliRunner().invoke(app, ["tune", "--method", "multi-lora", *given, *more])
        assert found.exit_code == 0, found.output
        (made,) = (tmp_path / place).iterdir()
        heads, shared = {}, set()
        for task in tasks.split(","):
            (head,) = [
                tensor
                for name, tensor in load_file(made / "adapter" / task / "adapter_model.safetensors").items()
                if name.endswith("classifier.weight")
            ]
            heads[task] = head
            shared.add(json.loads((made / "adapter" / task / "adapter_config.json").read_text())["checksum"])
        return heads, shared

    first, shared = drawn("first", 0, "cola,cb,stsb")
    again, _ = drawn("again", 0, "cola,stsb,cb")  # in another order
    other, other_shared = drawn("other", 1, "cola,cb,stsb")
    assert {task: len(head) for task, head in first.items()} == {"cola": 2, "cb": 3, "stsb": 1}
    for task, head in first.items():
        assert torch.allclose(head, again[task], rtol=0, atol=1e-9), task
        assert not torch.allclose(head, other[task], atol=1e-3), task
    assert shared == other_shared
    assert len(shared) == 1


def test_requests_of_different_tasks(run: Run, folder: Path, tmp_path: Path) -> None:
    requests = [
        {"task": "cola", "sentence": "w6 w7", "id": 1},
        {"task": "stsb", "sentence1": "w6", "sentence2": "w7 w8 w9"},
        {"task": "cb", "premise": "w9", "hypothesis": "w10"},
        {"task": "cola", "sentence": "w8"},
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in requests))
    found = answer(run.adapter, file, tmp_path / "out.jsonl")
    assert [each["task"] for each in found] == ["cola", "stsb", "cb", "cola"]
    assert found[0]["id"] == 1
    assert found[0]["label"] in ("acceptable", "unacceptable")
    assert found[2]["label"] in ("entailment", "contradiction", "neutral")
    assert "value" in found[1]
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == found
    # What a row is mixed with does not change its answer.
    tasks = Tasks(run.folder)
    for given, whole in zip(requests, found, strict=True):
        (alone,) = tasks.answer([tasks.request(given)])
        assert alone.keys() == whole.keys()
        for key, value in alone.items():
            assert value == pytest.approx(whole[key], abs=1e-5) if isinstance(value, float) else value == whole[key]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"task": "rte", "sentence1": "w6"}', "rte"),
        ('{"sentence": "w6"}', "None"),
        ('{"task": "cola"}', "sentence"),
        ("[1]", "line 1"),
        ("{", "line 1 is not JSON"),
        ("", "no lines"),
    ],
)
def test_requests_that_cannot_be_answered(line: str, said: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(InlayError, match=said):
        answer(run.adapter, file)


def test_a_task_is_exported_without_the_model(run: Run, folder: Path, tmp_path: Path) -> None:
    export(run.adapter, "cb", tmp_path / "lora")
    base = BertForSequenceClassification.from_pretrained(folder / "model", num_labels=3)
    lora = PeftModel.from_pretrained(base, str(tmp_path / "lora")).eval()
    tasks = Tasks(run.folder)
    ids = torch.tensor([[0, 9, 10, 11, 2]])
    with torch.no_grad():
        wanted = tasks.model(input_ids=ids, adapter_names=["cb"]).logits
        torch.testing.assert_close(lora(input_ids=ids).logits, wanted)
    with pytest.raises(InlayError, match="cbb"):
        export(run.adapter, "cbb", tmp_path / "other")
    with pytest.raises(InlayError, match="there already"):
        export(run.adapter, "cb", tmp_path / "lora")
    with pytest.raises(InlayError, match="form"):
        export(run.adapter, "cb", tmp_path / "other", to="gguf")


def test_where_an_export_goes_unless_it_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    try:
        found = CliRunner().invoke(app, ["export", "--adapter", str(run.adapter), "--task", "cola", "--to", "lora"])
    finally:
        os.umask(before)
    assert found.exit_code == 0, found.output
    files = list((tmp_path / "cola-lora").iterdir())
    assert {file.name for file in files} >= {"adapter_config.json", "adapter_model.safetensors"}
    # Others may read the weights who may read the rest: safetensors writes them for their owner alone.
    assert {file.stat().st_mode & 0o777 for file in files} == {0o640}
    with pytest.raises(InlayError, match="there already"):
        export(run.adapter, "cola")


def test_tasks_are_renamed_and_left_out_in_a_new_folder(run: Run, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    arguments = ["--adapter", str(run.folder), "--task", "stsb, cola=grammar", "--to", "tasks"]
    found = CliRunner().invoke(app, ["export", *arguments, "--output", str(tmp_path / "mine")])
    assert found.exit_code == 0, found.output
    kept = Tasks(tmp_path / "mine")
    assert list(kept.schemas) == ["stsb", "grammar"]
    for name, old, fields in (
        ("grammar", "cola", {"sentence": "w6 w7"}),
        ("stsb", "stsb", {"sentence1": "w6", "sentence2": "w7"}),
    ):
        (mine,) = kept.answer([kept.request({"task": name, **fields})])
        whole = Tasks(run.folder, only=[old])
        (wanted,) = whole.answer([whole.request({"task": old, **fields})])
        assert mine | {"task": old} == wanted
    for names, says in (
        ("cola,rte", "Unknown task 'rte'"),
        ("cola=x,cb=x", "'x'"),
        ("cola=a.b", "'a.b'"),
        ("cola=query", "names no part"),
        ("cola=../x", "cannot be"),
        ("cola=default", "cannot be"),
        ("", "Unknown task"),
    ):
        with pytest.raises(InlayError, match=says):
            export(run.folder, names, tmp_path / "other", to="tasks")
        assert not (tmp_path / "other").exists()
    assert before == {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}


def test_the_commands(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text('{"task": "cola", "sentence": "w6"}\n')
    done = CliRunner().invoke(app, ["predict", "--adapter", str(run.folder), str(tmp_path / "requests.jsonl")])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["task"] == "cola"
    arguments = ["export", "--adapter", str(run.folder), "--task", "cola", "--output", str(tmp_path / "lora")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (tmp_path / "lora" / "adapter_config.json").is_file()
    given = ["--model", str(folder / "model"), "--data-dir", str(folder / "data"), "--tasks", "cola, cb,stsb"]
    more = [
        "--max-steps",
        "4",
        "--batch-size",
        "8",
        "--evaluations",
        "1",
        "--lr",
        "0.05",
        "--out",
        str(folder / "runs"),
    ]
    found = CliRunner().invoke(app, ["tune", "--method", run.spec.method, *given, *more])
    assert found.exit_code == 0, found.output
    assert run.id in found.stdout  # found, not repeated
    shown = CliRunner().invoke(app, ["runs", "show", run.id, "--out", str(folder / "runs")])
    assert shown.exit_code == 0, shown.output
    assert "cb data" in shown.stdout


def test_what_cannot_be_tuned_together(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match="multi-lora or lora"):
        tune(spec(folder, method="bias"), tmp_path)
    with pytest.raises(InlayError, match=r"DoRA.*run of its own"):
        tune(spec(folder, method="lora", settings={"use_dora": True}), tmp_path)
    with pytest.raises(InlayError, match="at least two"):
        tune(spec(folder).with_(tasks=("cola",)), tmp_path)
    with pytest.raises(InlayError, match="sampling"):
        spec(folder, sampling="random")
    with pytest.raises(InlayError, match="temperature"):
        spec(folder, temperature=3.0)
    with pytest.raises(InlayError, match="several tasks"):
        Spec(model="m", method="multi-lora", task="rte", tasks=("cola", "cb"))


def test_a_run_of_several_tasks_answers_for_one_of_them(run: Run, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=r"choose one with task=.*--adapter"):
        inlay.load(run)
    with pytest.raises(InlayError, match="Known: cb, cola, stsb"):  # a file of rows that name no task
        predict(run, folder / "data" / "cola" / "test.jsonl")
    with pytest.raises(InlayError, match="rte"):
        inlay.load(run, task="rte")
    file = tmp_path / "requests.jsonl"
    rows = [{"sentence": "w6 w9 w10"}, {"sentence": "w16 w9"}]
    file.write_text("".join(json.dumps({"task": "cola", **row}) + "\n" for row in rows))
    together = predict(run, file)
    assert together == answer(run.folder, file)
    alone = predict(run, rows, task="cola")
    assert [each["label"] for each in alone] == [each["label"] for each in together]
    assert [each["score"] for each in alone] == pytest.approx([each["score"] for each in together], abs=1e-6)
    typed = CliRunner().invoke(app, ["predict", "--run", str(run.folder), "--task", "cola", "--input", str(file)])
    assert [json.loads(line)["label"] for line in typed.stdout.splitlines()] == [each["label"] for each in alone]


def test_a_run_of_several_tasks_is_scored_by_task(run: Run, folder: Path) -> None:
    for name, metric in (("cola", "matthews"), ("stsb", "pearson")):
        found = inlay.evaluate(run, folder / "data" / name / "test.jsonl", task=name)
        assert found.metric == metric
        assert found.metrics[metric] == pytest.approx(run.metrics["test"][f"{name}/{metric}"], abs=1e-6)
        assert found.test[metric] == run.metrics["test"][f"{name}/{metric}"]
        assert found.examples == found.test_examples == 9


# ------------------------------------------------------------------- what a run of one task can do, one of several can


def test_the_record_says_how_long_it_took_and_of_each_task_what_chance_would_be(run: Run) -> None:
    assert run.record["seconds"] > 0
    assert run.record["resumed_from"] is None
    cola = run.record["tasks"]["cola"]
    assert cola["chance"]["examples"] == cola["examples"]["test"] == 9
    assert 1 <= cola["classes_predicted"] <= 2
    assert run.record["tasks"]["stsb"]["classes_predicted"] is None


def test_it_is_watched_stopped_and_resumed(run: Run, folder: Path, tmp_path: Path) -> None:
    steps: list[int] = []

    class Watcher(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    names: list[str] = []
    with pytest.raises(Interrupted):
        tune(
            spec(folder, method=run.spec.method), tmp_path, progress=False, opened=names.append, watchers=[Watcher()],
            stop=lambda: len(steps) == 1,
        )  # fmt: skip
    assert names == [run.id]
    assert steps == [1, 2]  # it is asked before the watchers are told
    again = tune(spec(folder, method=run.spec.method), tmp_path, progress=False)
    assert again.record["resumed_from"] == 2
    assert again.metrics == run.metrics
    assert (again.adapter / "cola" / "adapter_model.safetensors").read_bytes() == (
        run.adapter / "cola" / "adapter_model.safetensors"
    ).read_bytes()


def test_one_that_failed_is_tried_again_if_so_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(objective: SeveralTasks, *args: Any) -> torch.Tensor:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(SeveralTasks, "task_losses", broken)
        with pytest.raises(RuntimeError, match="out of luck"):
            tune(spec(folder), tmp_path, progress=False)
    (failed,) = Store(tmp_path).list()
    assert failed.status == "failed"
    with pytest.raises(FailedBefore):
        tune(spec(folder), tmp_path, progress=False, retry_failed=False)
    assert tune(spec(folder), tmp_path, progress=False).status == "finished"


def test_its_name_is_known_before_it_is_made(run: Run, folder: Path) -> None:
    found, digest = identify(spec(folder, method=run.spec.method))
    assert found == run.spec
    assert digest == run.digest


def test_a_worker_that_dies_leaves_a_record_of_the_failure(folder: Path, tmp_path: Path) -> None:
    class Kills:
        """Ends the worker as soon as its run has made a step."""

        def begin(self, number: int) -> None: ...

        def say(self, number: int, line: str) -> None: ...

        def end(self, number: int, outcome: Any) -> None: ...

        def step(self, number: int, done: int, total: int) -> None:
            for worker in engine.pool:
                if worker.number is not None:
                    worker.process.kill()

    with LocalEngine(workers=1, cpus=1) as engine:
        (outcome,) = engine.run([job_of(spec(folder, max_steps=4000), tmp_path)], Kills())
    assert outcome.status == "failed"
    (left,) = Store(tmp_path).list()
    assert left.id == outcome.run
    assert left.status == "failed"
