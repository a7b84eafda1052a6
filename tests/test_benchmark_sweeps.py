"""benchmarks/everything.yaml and its variant at the size of published studies: whole, and told beforehand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zoo
from inlay.methods.registry import all_methods
from inlay.records.spec import Spec
from inlay.tasks import catalogue
from inlay.tasks.loading import load
from inlay.workflow.sweep import read

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROLES = {
    "vit": ("vit_tiny_patch16_224", "vit"),
    "resnet": ("resnet50_v1", "resnet"),
    "minilm": ("minilm", "bert"),
    "mlm": ("minilm_l6_mlm", "bert"),
    "mpnet": ("mpnet", "mpnet"),
    "smollm2": ("smollm2", "llama"),
    "gemma": ("gemma", "llama"),
    "roberta": ("roberta", "roberta"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of the right architectures under the names that the files have."""
    folder = tmp_path_factory.mktemp("models")
    for name, family in ROLES.values():
        zoo.tiny(family, "base")[0].save_pretrained(folder / name)
    return folder


def variables(models: Path, *names: str) -> list[str]:
    """The options that put these models in their places."""
    return [word for name in names for word in ("--var", f"{name}={models / ROLES[name][0]}")]


def counted(said: str) -> tuple[int, int]:
    """How many runs in how many comparisons a dry run says there are."""
    found = re.search(
        r"([\d,]+) runs in (\d+) comparisons\. 0 finished already and not repeated, .* is not known", said
    )
    assert found is not None, said[-500:]
    return int(found[1].replace(",", "")), int(found[2])


def test_everything_is_planned_whole(models: Path, tmp_path: Path, typed) -> None:
    """Every model with every set of its kind; every method that fits, with its own grid; five seeds."""
    given = {name: str(models / ROLES[name][0]) for name in ("minilm", "mpnet", "smollm2", "gemma")}
    sweep = read(BENCHMARKS / "everything.yaml", {"models": str(models), "data": str(tmp_path), **given})
    plans = sweep.plan()
    pairs = {(Path(planned.specs[0].model).name, planned.specs[0].task) for planned in plans}
    assert len(plans) == len(pairs) == 2 * 7 + 3 * 14 + 2 * 13 + 2 * 3
    assert {Path(model).name for model, _ in pairs} == {ROLES[name][0] for name in ROLES if name != "roberta"}
    assert all(catalogue.is_named(str(task)) for _, task in pairs)
    assert {(spec.seed, spec.epochs) for planned in plans for spec in planned.specs} == {(s, 10.0) for s in range(5)}
    small = {spec.task for planned in plans for spec in planned.specs if spec.shots == 200}
    assert small == {"cb", "copa", "wsc", "hymenoptera"}
    assert {spec.shots for planned in plans for spec in planned.specs} == {200, 800, 1000}
    for planned in plans:
        assert set(planned.methods) | set(planned.left_out) == set(all_methods())
        assert not planned.asked
    some = ["--var", f"models={models}", "--var", f"data={tmp_path}", "--var", "seeds=1", "--var", f"out={tmp_path}/r"]
    names = variables(models, *given)
    status, out, err = typed("sweep", BENCHMARKS / "everything.yaml", *some, *names, "--dry-run")
    assert status == 0, err
    assert counted(err) == (sum(len(planned.specs) for planned in plans) // 5, 88)
    assert len(out.splitlines()) == 1 + counted(err)[0]
    assert not (tmp_path / "r").exists()


def test_every_set_has_so_many_examples(shared: Path) -> None:
    """A run with more shots than training rows fails."""
    given = {"models": str(shared / "models"), "data": str(shared / "data")}
    wanted: dict[str, tuple[Spec, int]] = {}
    for part in read(BENCHMARKS / "everything.yaml", given).parts:
        for spec in part.specs:
            (shots,) = part.shots
            assert shots is not None
            wanted[str(spec.task)] = (spec, max(shots, wanted.get(str(spec.task), (spec, 0))[1]))
    assert len(wanted) == 7 + 14 + 3
    sizes = {name: len(load(spec).train or ()) for name, (spec, _) in wanted.items()}
    assert {name: sizes[name] for name, (_, shots) in wanted.items() if shots > sizes[name]} == {}


def test_the_variant_of_published_studies(models: Path, tmp_path: Path, typed) -> None:
    """VTAB-1k, whole, and GLUE without WNLI."""
    sweep = read(BENCHMARKS / "everything-paper.yaml")
    assert [(part.specs[0].model, len(part.specs)) for part in sweep.parts] == [
        ("google/vit-base-patch16-224-in21k", 19),
        ("FacebookAI/roberta-large", 8),
    ]
    vtab, glue = ({spec.task for spec in part.specs} for part in sweep.parts)
    assert {spec.protocol for spec in sweep.parts[0].specs} == {"vtab-1k"}
    assert glue == {"cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte"}
    assert len(vtab) == 19
    assert all(catalogue.is_named(name) for name in vtab)
    names = variables(models, "vit", "roberta")
    status, _, err = typed(
        "sweep",
        BENCHMARKS / "everything-paper.yaml",
        *names,
        "--var",
        f"out={tmp_path}/r",
        "--var",
        "seeds=1",
        "--dry-run",
    )
    assert status == 0, err
    runs, comparisons = counted(err)
    assert comparisons == 27
    assert runs > 27 * 30  # some twenty methods with three or four rates each


def test_models_and_data_must_be_named(typed) -> None:
    status, _, err = typed("sweep", BENCHMARKS / "everything.yaml", "--dry-run")
    assert (status, "The variable 'models' has no value: give one, as in --var models=VALUE." in err) == (2, True)
