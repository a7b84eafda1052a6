"""Several tasks of one's own in one run: `tasks.yaml`, `--task-data`, and what is made of them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import inlay
from inlay import InlayError, Spec
from inlay.records.store import Run, Store
from inlay.serve.hosting import ManyTasks, host
from inlay.workflow.settle import settle
from inlay.workflow.sweep import read as read_sweep
from inlay.workflow.tasks_file import gather, read

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FILE = """
- name: my_reviews
  data: reviews.csv
  test_data: held-out.csv
  text: body
  label: stars
- {name: mails, data: mails.csv, text: line, label: topic}
- {name: alike, data: pairs.csv, text: [one, other], label: score, kind: regression}
- {name: grammar, task: cola, data_dir: named, shots: 8}
"""


def table(path: Path, head: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; two tables with three and two classes, one of values, a named task; and the file."""
    import zoo
    from checkpoints import write_tokenizer

    place = tmp_path_factory.mktemp("own-tasks")
    zoo.tiny("bert", "base")[0].save_pretrained(place / "model")
    write_tokenizer(place / "model")
    stars = [[f"w{n % 3} w{6 + n % 9} w{6 + n % 7}", ("bad", "fair", "good")[n % 3]] for n in range(36)]
    table(place / "reviews.csv", ["body", "stars"], stars)
    table(place / "held-out.csv", ["body", "stars"], [[f"{body} w30", label] for body, label in stars[:9]])
    table(place / "mails.csv", ["line", "topic"], [[f"w{n % 2} w{6 + n % 9}", f"t{n % 2}"] for n in range(30)])
    values = [[f"w{n % 5} w{6 + n % 9}", f"w{n % 7}", n % 5 + 0.5] for n in range(30)]
    table(place / "pairs.csv", ["one", "other", "score"], values)
    (place / "named" / "cola").mkdir(parents=True)
    for split, count in (("train", 16), ("test", 8)):
        rows = [
            {"sentence": f"w{6 + n} w{n % 2}", "label": ("unacceptable", "acceptable")[n % 2]} for n in range(count)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (place / "named" / "cola" / f"{split}.jsonl").write_text(lines)
    (place / "tasks.yaml").write_text(FILE)
    return place


def spec(place: Path, file: str = "tasks.yaml", **changes: Any) -> Spec:
    given = {"model": str(place / "model"), "method": "lora", "max_steps": 3, "batch_size": 12, "learning_rate": 0.05}
    return Spec(**{**given, **read(place / file), **changes})


@pytest.fixture(scope="module", params=["lora", "multi-lora"])
def run(place: Path, request: pytest.FixtureRequest) -> Run:
    return inlay.tune(spec(place, method=request.param), place / "runs", progress=False)


# ------------------------------------------------------------------------------------------------------- the file


def test_a_file_says_what_each_task_has(place: Path) -> None:
    found = read(place / "tasks.yaml")
    assert found["tasks"] == ("my_reviews", "mails", "alike", "grammar")
    assert found["task_fields"]["my_reviews"] == {
        "data": str(place / "reviews.csv"),
        "test_data": str(place / "held-out.csv"),
        "text": ["body"],
        "label": "stars",
    }
    assert found["task_fields"]["grammar"] == {"task": "cola", "shots": 8, "data_dir": str(place / "named")}


def test_a_list_and_a_mapping_say_the_same(place: Path, tmp_path: Path) -> None:
    listed = "[rte, {name: mood, task: sst2}, {name: mails, data: mails.csv}, {task: cb, shots: 5}]"
    mapped = "{rte: , mood: {task: sst2}, mails: {data: mails.csv}, cb: {shots: 5}}"
    shutil.copy(place / "mails.csv", tmp_path)
    found = []
    for text in (listed, mapped):
        (tmp_path / "tasks.yaml").write_text(text)
        found.append(read(tmp_path / "tasks.yaml"))
    assert found[0] == found[1]
    assert found[0]["tasks"] == ("rte", "mood", "mails", "cb")
    assert set(found[0]["task_fields"]) == {"mood", "mails", "cb"}  # a named task by its own name is only named
    (tmp_path / "names.yaml").write_text("[rte, sst2]")
    assert read(tmp_path / "names.yaml") == {"tasks": ("rte", "sst2"), "task_fields": {}}


def test_every_mistake_is_said_at_once(place: Path) -> None:
    (place / "bad.yaml").write_text(
        """
- {name: a, data: revews.csv, lable: stars}
- {name: b, task: rte, text: body}
- {name: b, data: mails.csv, shots: 0}
- {data: mails.csv}
- {name: c}
- {name: d, task: rtee}
- {name: e, task: rte, data: mails.csv}
- {name: 2024, data: mails.csv}
- {name: default, data: mails.csv}
- {name: "1st", data: mails.csv}
- {name: f, data: 7}
- 5
"""
    )
    with pytest.raises(InlayError) as refused:
        read(place / "bad.yaml")
    said = str(refused.value)
    for part in (
        "bad.yaml has 14 mistakes:",
        "- a (entry 1): 'lable' is no key. Did you mean 'label'? Known: name, task, data",
        f"- a (entry 1): data: there is no file or folder {str(place / 'revews.csv')!r}. Did you mean",
        "- b (entry 2): text is for data of your own; 'rte' says it by itself.",
        "- b (entry 3): shots=0 must be greater than 0.",
        "- b (entry 3): the name is taken by an entry before it",
        "- entry 4: it has no name: add one, as in name: mails.",
        "- c (entry 5): it has neither task",
        "- d (entry 6): there is no task 'rtee'. Did you mean 'rte'",
        "- e (entry 7): task and data contradict each other",
        "- entry 8: name=2024 is no text: put it in quotes.",
        "- default (entry 9): 'default' cannot be a task's name",
        "- 1st (entry 10): '1st' cannot be a task's name",
        "- f (entry 11): data=7 will not do: give a text",
        "- entry 12: 5 is no task.",
        "a list of tasks, each a name or a mapping with the keys name, task, data",
    ):
        assert part in said, part


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no tasks"),
        ("rte", "holds no tasks"),
        ("[", "is not YAML"),
        ("{a: {data: x}, a: {data: y}}", "'a' is given twice"),
        ("{tasks: [rte, sst2]}", r"tasks \(entry 1\): \['rte', 'sst2'\] is no mapping of keys"),
    ],
)
def test_what_is_no_file_of_tasks(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").write_text(text)
    with pytest.raises(InlayError, match=says):
        read(tmp_path / "tasks.yaml")
    with pytest.raises(InlayError, match=r"Cannot read .*Did you mean"):
        read(tmp_path / "task.yaml")


def test_a_command_line_of_tasks(place: Path) -> None:
    found = gather(["rte"], ["reviews=a=b.csv", "spam=spam.csv"])
    assert found["tasks"] == ("rte", "reviews", "spam")
    assert found["task_fields"] == {"reviews": {"data": "a=b.csv"}, "spam": {"data": "spam.csv"}}
    both = gather(["sst2", str(place / "tasks.yaml")], ["more=x.csv"])
    assert both["tasks"] == ("sst2", "my_reviews", "mails", "alike", "grammar", "more")
    for data in (["reviews.csv"], ["=x"], ["a="]):
        with pytest.raises(InlayError, match="a name and a path"):
            gather([], data)
    with pytest.raises(InlayError, match="Two tasks are called 'mails'"):
        gather([str(place / "tasks.yaml")], ["mails=x.csv"])


# ------------------------------------------------------------------------------------------------------- the run


def test_one_run_of_all(run: Run, place: Path) -> None:
    assert list(run.record["tasks"]) == ["my_reviews", "mails", "alike", "grammar"]
    tasks = run.record["tasks"]
    assert {name: each["schema"]["kind"] for name, each in tasks.items()} == {
        "my_reviews": "classification",
        "mails": "classification",
        "alike": "regression",
        "grammar": "classification",
    }
    assert tasks["my_reviews"]["examples"]["test"] == 9
    assert tasks["grammar"]["examples"]["train"] == 8
    assert tasks["mails"]["schema"]["name"] == "mails"
    assert sorted(path.name for path in run.adapter.iterdir() if path.is_dir()) == sorted(tasks)
    assert Spec.from_json(run.spec.to_json()) == run.spec


def test_its_identity_is_what_is_in_the_files(run: Run, place: Path, tmp_path: Path) -> None:
    method = run.spec.method
    shutil.copytree(place, tmp_path / "moved", ignore=shutil.ignore_patterns("runs"))
    there = settle(spec(tmp_path / "moved", method=method, model=str(place / "model")))
    assert there.digest == run.digest
    again = inlay.tune(spec(place, method=method), place / "runs", progress=False)
    assert again.id == run.id
    text = (tmp_path / "moved" / "mails.csv").read_text()
    (tmp_path / "moved" / "mails.csv").write_text(text.replace("w7", "w17"))
    assert settle(spec(tmp_path / "moved", method=method)).digest != run.digest
    (tmp_path / "moved" / "mails.csv").write_text(text)
    assert settle(spec(tmp_path / "moved", method=method)).digest == run.digest
    (tmp_path / "moved" / "tasks.yaml").write_text(FILE.replace("shots: 8", "shots: 6"))
    assert settle(spec(tmp_path / "moved", method=method)).digest != run.digest


def test_the_columns_of_all_are_those_of_each(place: Path) -> None:
    data = {name: {"data": str(place / f"{name}.csv")} for name in ("reviews", "mails")}
    own = {name: fields | {"text": ["body"], "label": "stars"} for name, fields in data.items()}
    for name in ("reviews", "mails"):
        shutil.copy(place / "reviews.csv", place / f"same-{name}.csv")
        data[name]["data"] = own[name]["data"] = str(place / f"same-{name}.csv")
    table(place / "same-mails.csv", ["body", "stars"], [[f"w{n} w{n % 2}", n % 2] for n in range(20)])
    given = {"model": str(place / "model"), "method": "lora", "tasks": ("reviews", "mails"), "max_steps": 1}
    common = settle(Spec(task_fields=data, text=("body",), label="stars", **given))  # type: ignore[arg-type]
    each = settle(Spec(task_fields=own, **given))  # type: ignore[arg-type]
    assert common.spec == each.spec
    assert common.digest == each.digest


def test_every_verb_reads_it(run: Run, place: Path, tmp_path: Path, typed: Any) -> None:
    requests = [
        {"task": "my_reviews", "body": "w1 w1 w9"},
        {"task": "mails", "line": "w1 w8", "id": 3},
        {"task": "alike", "one": "w1", "other": "w2"},
        {"task": "grammar", "sentence": "w7 w1"},
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests))
    status, out, err = typed("predict", "--adapter", run.adapter, tmp_path / "requests.jsonl")
    assert status == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    assert answers[0]["label"] in ("bad", "fair", "good")
    assert 0 < answers[2]["value"] < 6
    hosted = host(run.folder, batch=4)
    assert isinstance(hosted, ManyTasks)
    served = hosted.answer([hosted.tasks.request(each) for each in requests])
    for request, answer, other in zip(requests, answers, served, strict=True):
        (alone,) = inlay.load(run, task=request["task"]).predict([request])
        for key, value in alone.items():
            assert value == (pytest.approx(answer[key], abs=1e-5) if isinstance(value, float) else answer[key])
            assert value == (pytest.approx(other[key], abs=1e-5) if isinstance(value, float) else other[key])
    found = inlay.evaluate(run, place / "held-out.csv", task="my_reviews")  # its label's name is the run's own
    assert found.metrics["accuracy"] == pytest.approx(run.metrics["test"]["my_reviews/accuracy"])
    status, _, err = typed("export", "--adapter", run.folder, "--task", "mails", "--output", tmp_path / "lora")
    assert status == 0, err
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"


def test_typed_with_data_by_name(place: Path, typed: Any, tmp_path: Path) -> None:
    table(place / "spam.csv", ["body", "stars"], [[f"w{n} w{n % 2}", ("ham", "spam")[n % 2]] for n in range(20)])
    words = ["--model", place / "model", "--method", "lora", "--max-steps", "1", "--batch-size", "8", "--out", tmp_path]
    data = ["--task-data", f"reviews={place / 'reviews.csv'}", "--task-data", f"spam={place / 'spam.csv'}"]
    status, _, err = typed("tune", *words, *data, "--text", "body", "--label", "stars")
    assert status == 0, err
    (made,) = Store(tmp_path).list()
    assert list(made.record["tasks"]) == ["reviews", "spam"]
    assert "reviews: data: your file" in err
    # Of a file, with a named task beside it whose columns are its own.
    status, _, err = typed("tune", *words, "--tasks", place / "tasks.yaml", "--max-length", "12")
    assert status == 0, err
    assert len(Store(tmp_path).list()) == 2


def test_mistakes_in_the_data_name_their_tasks(place: Path, tmp_path: Path) -> None:
    def own(**tasks: dict[str, Any]) -> Spec:
        return Spec(model=str(place / "model"), method="lora", tasks=tuple(tasks), task_fields=tasks)

    reviews, mails = {"data": str(place / "reviews.csv")}, {"data": str(place / "mails.csv")}
    with pytest.raises(InlayError, match=r"Task 'a': .*'nothing'[\s\S]*Task 'b': There is no file"):
        settle(own(a=reviews | {"label": "nothing"}, b={"data": "gone.csv"}, c=mails))
    with pytest.raises(InlayError, match="at least two"):
        settle(own(a=reviews))
    with pytest.raises(InlayError, match=r"'a-b' cannot be a task's name: .*, as in a_b"):
        settle(own(**{"a-b": reviews, "a_b": mails}))
    with pytest.raises(InlayError, match=r"cannot be mixed in one batch: a \(classification\), b \(causal-lm\)"):
        settle(own(a=reviews, b=mails | {"kind": "causal-lm", "text": ["line"]}))
    with pytest.raises(InlayError, match="Use multi-lora or lora"):
        settle(own(a=reviews, b=mails).with_(method="bias"))
    with pytest.raises(InlayError, match=r"--task-data mails=.*or an entry in tasks.yaml"):
        settle(Spec(model=str(place / "model"), method="lora", tasks=(str(place / "mails.csv"), "rte")))


def test_a_sweep_and_a_comparison_of_them(place: Path, tmp_path: Path) -> None:
    text = (
        f"model: {place / 'model'}\ntasks: [[reviews, mails], mails]\nmethods: [lora, bias]\nseeds: 1\nmax_steps: 2\n"
    )
    own = {
        "reviews": {"data": str(place / "reviews.csv"), "label": "stars"},
        "mails": {"data": str(place / "mails.csv"), "label": "topic"},
    }
    (tmp_path / "sweep.yaml").write_text(text + f"task_fields: {json.dumps(own)}\n")
    both, one = read_sweep(tmp_path / "sweep.yaml").plan()
    assert both.left_out == {"bias": "trains one task at a time"}
    assert [each.task_fields for each in both.specs] == [own]
    assert {each.data for each in one.specs} == {own["mails"]["data"]}
    assert {each.method for each in one.specs} == {"lora", "bias"}
    (tmp_path / "sweep.yaml").write_text(text + "task_fields: {revews: {data: x.csv}}\n")
    with pytest.raises(InlayError, match=r"Unknown task in task_fields 'revews'\. Did you mean 'reviews'"):
        read_sweep(tmp_path / "sweep.yaml")
