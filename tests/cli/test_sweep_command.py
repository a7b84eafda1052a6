"""`inlay sweep` and the new words of `inlay compare`, as a person types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from inlay import Spec
from inlay.errors import InlayError
from inlay.records.store import Store
from inlay.workflow.planning import check_baseline, plan
from inlay.workflow.sweep import SCHEMA, read

GOOD = """
model: embedded:vit
task: digits
methods: [linear-probe, lora]
seeds: 2
shots: [50, 100]
learning_rates: [1e-3, 3e-3]
baseline: lora
epochs: 1
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return path


def test_a_sweep_is_every_combination(tmp_path: Path) -> None:
    sweep = read(written(tmp_path, GOOD + "settings: {lora: {r: 4}}\nengine: {name: local, workers: 2}\n"))
    (planned,) = sweep.plan()
    assert len(planned.specs) == 2 * 2 * 2 * 2
    assert {(s.method, s.seed, s.shots, s.learning_rate) for s in planned.specs} == {
        (method, seed, shots, rate)
        for method in ("linear-probe", "lora")
        for seed in (0, 1)
        for shots in (50, 100)
        for rate in (1e-3, 3e-3)
    }
    assert {s.method: dict(s.settings) for s in planned.specs} == {"linear-probe": {}, "lora": {"r": 4}}
    assert {s.epochs for s in planned.specs} == {1.0}
    assert sweep.engine == {"name": "local", "workers": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("seeds", "sedes"), r"Unknown key 'sedes'\. Did you mean 'seeds'"),
        (lambda text: text + "engine: {worker: 2}\n", r"Unknown key 'worker'\. Did you mean 'workers'"),
        (lambda text: text.replace("seeds: 2", "seeds: two"), "seeds: 'two' will not do"),
        (lambda text: text.replace("seeds: 2", "seeds: 0"), "seeds: 0 will not do: give 1 or more"),
        (lambda text: text.replace("seeds: 2", "seeds: .inf"), "seeds: inf will not do"),
        (lambda text: text + "minutes: -3\n", "minutes: -3 will not do: give a number greater than 0"),
        (lambda text: text + "engine: {workers: 0}\n", "workers: 0 will not do: give 1 or more"),
        (lambda text: text + "settings: {lora: {ranc: 4}}\n", "Unknown setting of method 'lora' 'ranc'"),
        (lambda text: text + "settings: {linear-probe: {r: 4}}\n", "'linear-probe' has no settings"),
        (lambda text: text.replace("epochs: 1", "epochs: much"), "epochs='much' will not do: give a finite number"),
        (lambda text: text.replace("epochs: 1", "batch_size: 1.5"), "batch_size=1.5 will not do: give a whole number"),
        (lambda text: text.replace("epochs: 1", "gradient_checkpointing: 1"), "give True or False"),
        (lambda text: text + "models: [embedded:resnet]\n", "model and models contradict"),
        (lambda text: text + "data: photos/\n", "task and data contradict"),
        (lambda text: text.replace("baseline: lora", "baseline: bias"), "'bias' is not among the methods"),
        (lambda text: text + "learning_rate: 0.1\n", "contradict each other"),
        (lambda text: text.replace("task: digits\n", ""), "task is missing"),
        (lambda text: text + "task: digits\n", r"'task' is given twice \(line 10\)"),
        (lambda text: text + "? [a, b]\n: 1\n", r"a key is a list or a mapping \(line 10\)"),
        (lambda text: text + "settings: {{a: 1}: 2}\n", r"a key is a list or a mapping \(line 10\)"),
        (lambda text: "[" * 100_000, "within one another too many times over"),
        (lambda text: text.replace("[linear-probe, lora]", "[lora, lora]"), "each once"),
        (lambda text: text.replace("[linear-probe, lora]", "[lora, loora]"), "Did you mean 'lora'"),
        (lambda text: text.replace("embedded:vit", "embedded:minilm"), "reads texts"),
        (lambda text: text + "settings: [1]\n", "give settings by method"),
        (lambda text: text + "trust_remote_code: true\n", "Unknown key 'trust_remote_code'"),
        (lambda text: "- a\n- b\n", "is not a sweep"),
        (lambda text: "a: [", "is not YAML"),
        (lambda text: text + "out: !!python/object/apply:os.getcwd []\n", "is not YAML"),
    ],
)  # fmt: skip
def test_a_wrong_sweep_is_one_error_before_anything_starts(
    change: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, change(GOOD))
    with pytest.raises(InlayError, match=message):
        read(path).plan()


def test_every_field_of_a_spec_has_its_place() -> None:
    """A field that is added to runs' specs is a key of sweeps by itself."""
    from dataclasses import fields

    elsewhere = {"method", "seed", "trust_remote_code"}
    assert {each.name for each in fields(Spec)} - elsewhere <= set(SCHEMA)


def test_all_methods_that_fit(review_spec: Spec) -> None:
    planned = plan(review_spec, ["all"], 1)
    assert {"bias", "lora", "linear-probe"} <= set(planned.methods)
    assert {"vpt-deep", "visual-prompt"} <= planned.left_out.keys()
    assert not planned.asked
    assert plan(review_spec, ["bias", "vpt-deep"], 1).asked == {"vpt-deep"}


def test_a_baseline_that_does_not_run_is_refused_before_anything_does(review_spec: Spec) -> None:
    plans = [plan(review_spec, ["all"], 1)]
    check_baseline("bias", plans)
    check_baseline(None, plans)
    for wrong, message in (("bais", "Did you mean 'bias'"), ("vpt-deep", "does not work on .* models")):
        with pytest.raises(InlayError, match=message):
            check_baseline(wrong, plans)


def test_each_method_has_its_own_grid(review_spec: Spec) -> None:
    from inlay.methods.registry import get

    planned = plan(review_spec.with_(learning_rate=None), ["bias", "lora"], 1, rates="grid")
    for name in ("bias", "lora"):
        rates = {spec.learning_rate for spec in planned.specs if spec.method == name}
        assert rates == {*get(name).grid, get(name).learning_rate}


def test_sweep_and_compare_print_a_table_and_leave_a_page(typed, review_spec: Spec, tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"model: {review_spec.model}\ndata: {review_spec.data}\ntext: body\nlabel: stars\n"
        "methods: [bias, linear-probe]\nseeds: 1\nmax_steps: 2\nbatch_size: 8\nout: runs\n",
    )
    status, out, err = typed("sweep", path, "--dry-run")
    assert status == 0, err
    assert len(out.splitlines()) == 3
    assert "2 runs in 1 comparison." in err
    assert not Path("runs").exists()
    status, out, err = typed("sweep", path, "--quiet")
    assert status == 0, err
    assert out.splitlines()[0].startswith("method\t")
    assert "<html" in Path("runs/report.html").read_text()
    data = json.loads(Path("runs/comparison.json").read_text())
    assert {row["method"] for row in data["comparisons"][0]["rows"]} == {"bias", "linear-probe"}
    stamps = {run.id: run.record["finished"] for run in Store(Path("runs")).list()}
    what = ("--data", review_spec.data, "--text", "body", "--label", "stars", "--max-steps", "2", "--batch-size", "8")
    compare = ("compare", "--model", review_spec.model, *what, "--methods", "bias,linear-probe", "--seeds", "1")
    status, again, err = typed(*compare, "--out", "runs", "--baseline", "bias")
    assert status == 0, err
    assert out.splitlines()[1:] == again.splitlines()[1 : len(out.splitlines())], "the same runs, the same table"
    assert "the baseline" in again
    assert stamps == {run.id: run.record["finished"] for run in Store(Path("runs")).list()}
    assert "Too few seeds to tell" in err
    assert typed("sweep", "nowhere.yaml")[0] == 2
    assert typed(*compare, "--learning-rates", "grid", "--learning-rate", "0.1")[0] == 2
    assert typed(*compare, "--engine", "local", "--address", "auto")[0] == 2


def test_numbers_may_be_written_as_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    more = 'max_steps: 1e3\nbatch_size: 32.0\nwarmup: ".1"\nminutes: "5"\n'
    path.write_text(GOOD.replace("epochs: 1", 'epochs: "5"').replace("[1e-3, 3e-3]", '["0.1"]') + more)
    found = read(path)
    spec = found.plan()[0].specs[0]
    assert (spec.epochs, spec.max_steps, spec.batch_size, spec.warmup, spec.learning_rate) == (5, 1000, 32, 0.1, 0.1)
    assert found.minutes == 5


PARTS = """
variables: {data: null, seeds: 3, lr: 1e-3}
methods: [linear-probe, lora]
seeds: ${seeds}
baseline: lora
learning_rates: ["${lr}"]
epochs: 1
parts:
  - {model: "embedded:vit", task: digits}
  - {model: "${data}/vit", tasks: [cifar10, digits], data_dir: "${data}", methods: [lora], shots: 20}
"""


def test_parts_share_what_they_do_not_say(tmp_path: Path) -> None:
    """A part's own keys count; a variable has the value given, or its default."""
    sweep = read(written(tmp_path, PARTS), {"data": "/mnt/d", "seeds": "2"})
    assert sweep.specs == ()
    assert [[spec.subject for spec in part.specs] for part in sweep.parts] == [["digits"], ["cifar10", "digits"]]
    assert [part.methods for part in sweep.parts] == [("linear-probe", "lora"), ("lora",)]
    assert [part.shots for part in sweep.parts] == [(None,), (20,)]
    assert {(part.seeds, part.rates[0]) for part in sweep.parts} == {(2, 0.001)}
    assert {(spec.model, spec.data_dir) for spec in sweep.parts[1].specs} == {("/mnt/d/vit", "/mnt/d")}
    assert sweep.baseline == "lora"


def test_without_variables_nothing_is_filled_in(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("task: digits", "data: '${HOME}.csv'"))
    assert read(path).specs[0].data == "${HOME}.csv"
    with pytest.raises(InlayError, match="Unknown variable 'HOME'"):
        read(path, {"HOME": "x"})


def test_parts_are_planned_one_after_the_other(tmp_path: Path) -> None:
    text = PARTS.replace('"${data}/vit"', '"embedded:resnet"').replace(
        '[cifar10, digits], data_dir: "${data}"', "[digits]"
    )
    plans = read(written(tmp_path, text)).plan()
    assert [(planned.specs[0].model, len(planned.specs)) for planned in plans] == [
        ("embedded:vit", 6),
        ("embedded:resnet", 3),
    ]


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        (("", ""), {}, "The variable 'data' has no value: give one, as in --var data=VALUE"),
        (("", ""), {"dta": "x"}, "Unknown variable 'dta'. Did you mean 'data'"),
        (("${seeds}", "${sedes}"), {"data": "x"}, "Unknown variable 'sedes'. Did you mean 'seeds'"),
        (("{data: null, seeds: 3, lr: 1e-3}", "[data]"), {"data": "x"}, "variables: give names with their defaults"),
        (("shots: 20", "shots: much"), {"data": "x"}, "part 2: shots: 'much' will not do"),
        (("shots: 20", "out: here"), {"data": "x"}, "part 2: out: belongs beside `parts`"),
        (("methods: [lora]", "methods: [bias]"), {"data": "x"}, "part 2: baseline: 'lora' is not among the methods"),
        (("task: digits}", "tasc: digits}"), {"data": "x"}, "Unknown key 'tasc'. Did you mean 'task'"),
        (("seeds: ${seeds}", "seeds: ${seeds}.5"), {"data": "x"}, "part 1: seeds: '3.5' will not do"),
    ],
)  # fmt: skip
def test_wrong_parts_and_variables(
    change: tuple[str, str], given: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InlayError) as error:
        read(written(tmp_path, PARTS.replace(*change)), given)
    assert message in str(error.value)


def test_no_parts_are_an_error(tmp_path: Path) -> None:
    for parts in ("[]", "3", "[a]", "{a: 1}"):
        with pytest.raises(InlayError, match="parts: give a list of parts"):
            read(written(tmp_path, f"model: embedded:vit\nparts: {parts}\n"))


def test_a_sweep_over_tasks_ranks_the_methods(typed, review_spec: Spec, tmp_path: Path) -> None:
    """Real runs: five tasks on one's own data are ranked, at the end, in comparison.json and on the page; of two it is
    said why they are not."""
    names = "abcde"
    lines = Path(str(review_spec.data)).read_text().splitlines()
    for number, name in enumerate(names):
        Path(f"{name}.csv").write_text("\n".join([lines[0], *lines[1 + number :]]) + "\n")

    def sweep_of(names: str) -> Path:
        fields = ", ".join(f"{name}: {{data: {name}.csv, text: [body], label: stars}}" for name in names)
        return written(
            tmp_path,
            f"variables: {{model: null}}\nmodel: ${{model}}\ntasks: [{', '.join(names)}]\ntask_fields: {{{fields}}}\n"
            "methods: [bias, linear-probe]\nseeds: 1\nmax_steps: 2\nbatch_size: 8\nout: runs\n",
        )

    path = sweep_of(names)
    status, _, err = typed("sweep", path, "--var", f"model={review_spec.model}")
    assert status == 0, err
    assert "Over 5 tasks (" in err
    assert "5 tasks are too few for any pair of 2 methods to differ, whatever the scores: that takes 6 tasks." in err
    (ranked,) = json.loads(Path("runs/comparison.json").read_text())["over_tasks"]
    assert sorted(ranked["methods"]) == ["bias", "linear-probe"]
    assert len(ranked["tasks"]) == 5
    assert "Over 5 tasks" in Path("runs/report.html").read_text()
    path = sweep_of("ab")
    status, _, err = typed("sweep", path, "--var", f"model={review_spec.model}")
    assert status == 0, err
    assert "a ranking needs 5 tasks, and there are 2." in err
    for wrong in ("model", "=x"):
        status, _, err = typed("sweep", path, "--var", wrong)
        assert (status, "--var takes NAME=VALUE" in err) == (2, True)
