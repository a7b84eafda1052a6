"""Data of one's own where several tasks are: two tables, two runs, joined, predicted and served."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hosts import call, same

import inlay
import zoo
from checkpoints import write_tokenizer
from inlay import InlayError, Spec
from inlay.records.store import Run
from inlay.serve.hosting import ManyTasks, host
from inlay.serve.running import serving
from inlay.serve.settings import ServiceSettings
from inlay.workflow.answer import Tasks, answer
from inlay.workflow.export import export
from inlay.workflow.notes import silent

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EACH = ["my_reviews=a", "my_reviews=b"]
STARS, TOPICS = {"body": "w1 w1 w9"}, {"line": "w2 w8 w8"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and two tables of the same name whose labels differ in number."""
    place = tmp_path_factory.mktemp("own")
    zoo.tiny("bert", "base")[0].save_pretrained(place / "model")
    write_tokenizer(place / "model")
    for folder, text, label, classes in (("a", "body", "stars", 3), ("b", "line", "topic", 2)):
        (place / folder).mkdir()
        with (place / folder / "my-reviews.csv").open("w", newline="") as file:
            rows = [[f"w{n % classes} w{6 + n % 9} w{6 + n % 7}", n % classes] for n in range(36)]
            csv.writer(file).writerows([[text, label], *rows])
    return place


def made(place: Path, folder: str, **changes: Any) -> Run:
    columns = {"a": ("body", "stars"), "b": ("line", "topic")}[folder]
    given: dict[str, Any] = {"method": "multi-lora", "max_steps": 4, "batch_size": 8, "learning_rate": 0.05}
    data = str(place / folder / "my-reviews.csv")
    spec = Spec(model=str(place / "model"), data=data, text=columns[0], label=columns[1], **{**given, **changes})
    return inlay.tune(spec, place / "runs", progress=False, say=silent)


@pytest.fixture(scope="module", params=["multi-lora", "lora"])
def runs(place: Path, request: pytest.FixtureRequest) -> tuple[Run, Run]:
    return made(place, "a", method=request.param), made(place, "b", method=request.param)


@pytest.fixture(scope="module")
def joined(runs: tuple[Run, Run], place: Path) -> Path:
    folders = [run.folder for run in runs]
    target = place / f"joined-{runs[0].spec.method}"
    return export(folders, ["my_reviews=stars", "my_reviews=topic"], target, to="tasks")


def test_joined_tasks_answer_as_each_run_does_by_itself(
    runs: tuple[Run, Run], joined: Path, tmp_path: Path, typed: Any
) -> None:
    requests = [{"task": "topic", **TOPICS}, {"task": "stars", "id": 7, **STARS}, {"task": "topic", "line": "w9"}]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests))
    status, out, err = typed("predict", "--adapter", joined, "requests.jsonl", "--probabilities")
    assert status == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    for request, found in zip(requests, answers, strict=True):
        run = runs[0 if request["task"] == "stars" else 1]
        (wanted,) = inlay.load(run).predict([request], probabilities=True)
        chances, expected = found.pop("probabilities"), wanted.pop("probabilities")
        assert chances == pytest.approx(expected, abs=1e-5)
        assert same(found, wanted)
    assert [len(json.loads(line)["probabilities"]) for line in out.splitlines()] == [2, 3, 2]


def test_a_single_run_is_predicted_served_and_joined_by_others_while_it_is(
    runs: tuple[Run, Run], joined: Path, place: Path, tmp_path: Path
) -> None:
    """The label counts differ: the head of a run of one task has the size that was saved, not that of the base."""
    stars, _ = runs
    (tmp_path / "requests.jsonl").write_text(json.dumps(STARS) + "\n")  # one task: it need not be named
    (wanted,) = answer(stars.folder, tmp_path / "requests.jsonl")
    assert same(wanted, inlay.load(stars).predict([STARS])[0])
    hosted = host(stars.folder, batch=4)
    assert isinstance(hosted, ManyTasks)
    with serving(hosted, ServiceSettings(port=0, add_from=place)) as address:
        status, listed = call(address, "/tasks")
        assert (status, [each["task"] for each in listed["tasks"]]) == (200, ["my_reviews"])
        assert same(call(address, "/predict", STARS)[1], wanted)
        status, said = call(address, "/tasks", {"task": "topic", "adapter": str(joined)})
        assert status in (200, 201), said
        both = [{"task": "topic", **TOPICS}, {"task": "my_reviews", **STARS}]
        status, found = call(address, "/predict", both)
        assert status == 200
        assert same(found[0], Tasks(joined).answer([Tasks(joined).request(both[0])])[0])
        assert found[1]["label"] == wanted["label"]


def test_joined_tasks_are_served_together(joined: Path) -> None:
    with serving(host(joined, batch=4), ServiceSettings(port=0)) as address:
        status, found = call(address, "/predict", [{"task": "topic", **TOPICS}, {"task": "stars", **STARS}])
    assert status == 200
    assert [set(each) for each in found] == [
        {"task", "line", "label", "score"},
        {"task", "body", "label", "score"},
    ]


def test_one_run_becomes_a_lora_or_a_folder_of_one_task(runs: tuple[Run, Run], tmp_path: Path, typed: Any) -> None:
    status, _, err = typed("export", "--adapter", runs[0].folder, "--output", "lora")
    assert status == 0, err
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    status, _, err = typed("export", "--adapter", runs[0].folder, "--task", "my_reviews=x", "--to", "tasks")
    assert status == 0, err
    assert list(Tasks(tmp_path / "my_reviews-x-tasks").schemas) == ["x"]


def test_what_cannot_be_joined_is_said_and_nothing_is_left(runs: tuple[Run, Run], place: Path, tmp_path: Path) -> None:
    stars, topic = runs
    bias = made(place, "a", method="bias")
    by = {"method": stars.spec.method}
    shared = (
        []
        if by["method"] == "lora"
        else [([stars.folder, made(place, "b", settings={"r": 4}).folder], EACH, "r=4.*r=8")]
    )
    for folders, task, says in (
        ([stars.folder, topic.folder], None, r"Two tasks would be called 'my_reviews'.*one --task for each --adapter"),
        ([stars.folder, topic.folder], "my_reviews=a", "a task of 2 of the adapter folders"),
        ([stars.folder, topic.folder], ["my_reviews=a", "review=b"], "Unknown task 'review'"),
        ([stars.folder], ["a", "b"], "1 adapter folders and 2 lists"),
        *shared,  # LoRAs may have any rank
        ([stars.folder, made(place, "b", max_length=9, **by).folder], EACH, "max_length=9"),
        ([stars.folder, bias.folder], None, "method 'bias', whose task is never mixed"),
        ([tmp_path], None, "holds no tasks"),
    ):
        with pytest.raises(InlayError, match=says):
            export(folders, task, tmp_path / "new", to="tasks")
        assert not (tmp_path / "new").exists()


def test_no_message_points_in_a_circle(runs: tuple[Run, Run], place: Path, tmp_path: Path, typed: Any) -> None:
    """What an error names as the next step is a command that there is, and that does it."""
    (tmp_path / "requests.jsonl").write_text(json.dumps(STARS) + "\n")
    bias = made(place, "a", method="bias")
    _, _, err = typed("predict", "--adapter", bias.folder, "requests.jsonl")
    assert f"`inlay predict --run {bias.folder}`" in err
    assert "inlay export --adapter <run> --adapter <run> --to tasks" in err
    assert typed("predict", "--run", bias.folder, "--input", place / "a" / "my-reviews.csv")[0] == 0
    tables = f"{place / 'a' / 'my-reviews.csv'},{place / 'b' / 'my-reviews.csv'}"
    status, _, err = typed("tune", "--model", place / "model", "--tasks", tables, "--method", "multi-lora")
    assert status == 2
    assert "--task-data my_reviews=" in err
    assert "inlay export --adapter <run> --adapter <run> --to tasks" in err


def test_a_name_that_no_adapter_can_have_gets_one_that_it_can(place: Path) -> None:
    (place / "c").mkdir()
    for name in ("2024", "query"):
        path = place / "c" / f"{name}.csv"
        path.write_text((place / "a" / "my-reviews.csv").read_text())
        spec = Spec(model=str(place / "model"), data=str(path), text="body", label="stars", method="multi-lora")
        run = inlay.tune(spec.with_(max_steps=1, batch_size=8), place / "c" / name, progress=False, say=silent)
        assert list(Tasks(run.folder).schemas) == [f"task_{name}"]
