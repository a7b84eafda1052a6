"""`inlay tune run.yaml` and `--print-config`, as a person types them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from inlay import Spec
from inlay.errors import InlayError
from inlay.records.store import Store
from inlay.workflow import sweep
from inlay.workflow.run_file import SCHEMA, read, write

GOOD = """
model: embedded:minilm
task: rotten-tomatoes
method: lora
settings: {r: 16}
seed: 3
learning_rate: 1e-3
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_a_file_is_a_spec_and_what_is_given_overrides_it(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + "out: elsewhere\n")
    found = read(path)
    assert found.out == "elsewhere"
    asked = {"model": "embedded:minilm", "task": "rotten-tomatoes", "method": "lora", "learning_rate": 1e-3}
    assert found.spec == Spec(**asked, settings={"r": 16}, seed=3)
    changed = read(path, {"seed": 0, "settings": {"lora_alpha": 4}, "data": "x.csv"}).spec
    assert changed == Spec(
        model="embedded:minilm",
        data="x.csv",
        method="lora",
        learning_rate=1e-3,
        settings={"r": 16, "lora_alpha": 4},
    )


def test_settings_are_the_methods_own_or_by_method_as_in_a_sweep(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("{r: 16}", "{lora: {r: 16}, prefix: {num_virtual_tokens: 4}}"))
    assert read(path).spec.settings == {"r": 16}
    assert read(path, {"method": "prefix"}).spec.settings == {"num_virtual_tokens": 4}
    assert read(path, {"method": "bias"}).spec.settings == {}


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "model: embedded:minilmm\ntask: rotten-tomatos\nmetod: lora\nmethod: lora\nsettings: {lora_alfa: 1}\n"
        "epochs: -3\nschedule: linaer\nbatch_size: 1.5\nsampling: temperature\ntemperature: 2\n",
    )
    with pytest.raises(InlayError) as caught:
        read(path)
    said = str(caught.value)
    for part in (
        "7 mistakes:",
        "Did you mean 'minilm'",
        "Did you mean 'rotten-tomatoes'",
        "Unknown key 'metod'. Did you mean 'method'",
        "Did you mean 'lora_alpha'",
        "epochs=-3 must be greater than 0",
        "Did you mean 'linear'",
        "batch_size=1.5 will not do",
    ):
        assert part in said
    assert "temperature=" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("method: lora\n", ""), "method is missing"),
        (GOOD.replace("task: rotten-tomatoes\n", ""), "task is missing"),
        (GOOD + "data: x.csv\n", "task and data contradict"),
        (GOOD + "methods: [lora]\n", "Unknown key 'methods'. Did you mean 'method'"),
        (GOOD + "trust_remote_code: true\n", "Unknown key 'trust_remote_code'"),
        (GOOD.replace("{r: 16}", "[r]"), "give settings of the method"),
        (GOOD + "temperature: 2\n", "says nothing to proportional sampling"),
        ("- a\n", "is not a run"),
    ],
)
def test_a_wrong_file_is_one_error(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InlayError, match=message):
        read(written(tmp_path, text))


def test_every_field_of_a_spec_is_a_key() -> None:
    assert {each.name for each in fields(Spec)} - set(SCHEMA) == {"trust_remote_code"}
    assert set(SCHEMA) <= {*sweep.SCHEMA}


@pytest.mark.parametrize(
    "spec",
    [
        Spec(
            model="m", method="lora", task="sst2", settings={"r": 4, "target_modules": ["a", "b"]}, learning_rate=1e-5
        ),
        Spec(model="m", method="multi-lora", tasks=("rte", "sst2"), sampling="temperature", temperature=3),
        Spec(
            model="./é: m", method="bias", data="#x.csv", text=("a", "b: c"), label="yes", gradient_checkpointing=True
        ),
    ],
)
def test_what_is_written_is_read_again_by_tune_and_by_sweep(spec: Spec, tmp_path: Path) -> None:
    path = written(tmp_path, write(spec, "here"))
    assert (read(path).spec, read(path).out) == (spec, "here")
    assert sweep.read(path).settings.get(spec.method, {}) == spec.settings
    (again,) = sweep.read(path).specs
    assert again.with_(method=spec.method, settings=spec.settings) == spec


def test_the_printed_file_finds_the_run(typed, review_spec: Spec, tmp_path: Path) -> None:
    words = ("--data", review_spec.data, "--text", "body", "--label", "stars", "--max-steps", "2", "--out", "mine")
    made = ("tune", "--model", review_spec.model, *words, "--method", "bias")
    status, out, err = typed(*made, "--print-config")
    assert status == 0, err
    assert not Path("mine").exists()
    path = written(tmp_path, out)
    status, _, err = typed(*made, "--quiet")
    assert status == 0, err
    status, out, err = typed("tune", path)
    assert status == 0, err
    assert "already done" in err
    status, _, err = typed("tune", path, "--seed", "1", "--quiet")
    assert status == 0, err
    assert sorted(run.spec.seed for run in Store(Path("mine")).list()) == [0, 1]
    status, _, err = typed("tune", path, "--print-config", "--max-steps", "3", "--out", "other")
    assert status == 0, err
    assert not Path("other").exists()


def test_without_a_file_model_and_method_are_asked_for(typed) -> None:
    status, _, err = typed("tune", "--method", "lora", "--task", "sst2")
    assert (status, "--model is missing" in err) == (2, True)
    status, _, err = typed("tune", "rum.yaml")
    assert (status, "Cannot read rum.yaml" in err) == (2, True)
