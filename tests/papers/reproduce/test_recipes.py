"""Every recipe runs at `smoke`; whether its claims hold is no matter of tests. And what is said when one cannot run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inlay.errors import InlayError
from inlay.papers.reproduce import catalogue, kept
from inlay.papers.reproduce.bench import Bench
from inlay.papers.reproduce.drawing import style
from inlay.papers.reproduce.latest import count_verdicts, last_verdicts, path_of
from inlay.papers.reproduce.perform import Reproduction, reproduce, with_own_means
from inlay.papers.reproduce.predicates import above
from inlay.papers.reproduce.recipe import SCALES, UNTESTED, Claim, RecipeScale
from inlay.papers.reproduce.results import Results
from inlay.records.spec import Spec
from inlay.workflow.tune import tune


@pytest.fixture
def document(script: Any) -> Any:
    """The generator of docs/fidelity.md."""
    return script("document_fidelity")


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: runs and stand-ins that recipes share are made once."""
    return tmp_path_factory.mktemp("reproduce")


@pytest.mark.parametrize("name", list(catalogue.recipes()))
def test_smoke(name: str, out: Path) -> None:
    outcome = reproduce(name, "smoke", Bench(out, progress=False))
    assert not outcome.ours.failures
    assert outcome.ours.cells or outcome.ours.stated
    item = name.partition("/")[2]
    files = {path.name for path in outcome.folder.iterdir()}
    endings = {".csv", ".md", ".json"} | ({".png", ".svg"} if outcome.recipe.draw else set())
    assert files == {f"{item}{ending}" for ending in endings}
    found = json.loads((outcome.folder / f"{item}.json").read_text())
    assert [claim["claim"] for claim in found["claims"]] == [claim.text for claim in outcome.recipe.claims]
    assert found["versions"]["torch"]
    for claim in outcome.recipe.claims:
        assert claim.text in (outcome.folder / f"{item}.md").read_text()


@pytest.mark.parametrize("name", list(catalogue.recipes()))
def test_what_a_recipe_states(name: str) -> None:
    """Times, and models and data that exist by name; claims on the printed table never break, and some are decided."""
    from inlay.tasks import catalogue as tasks

    recipe = catalogue.recipes()[name]
    for scale in SCALES:
        stated = recipe.scales[scale]
        assert stated.summary.endswith(".")
        assert stated.time
        assert all(tasks.is_named(task) for task in stated.data)
    if recipe.printed is not None:
        verdicts = recipe.judged_as_printed()
        assert any(verdict.judgement != UNTESTED for verdict in verdicts)


def test_a_finished_recipe_finds_its_runs_again(out: Path) -> None:
    lines: list[str] = []
    first = reproduce("activation-prompts/table-1", "smoke", Bench(out, progress=False))
    again = reproduce("activation-prompts/table-1", "smoke", Bench(out, progress=False, say=lines.append))
    assert sum(line.startswith("already done") for line in lines) == 4
    assert again.ours == first.ours


def test_unknown_names() -> None:
    with pytest.raises(InlayError, match="Did you mean 'activation-prompts/table-2'"):
        catalogue.choose("activation-prompt/table-2")
    with pytest.raises(InlayError, match="lemma-1"):
        catalogue.choose("lemma-1")
    with pytest.raises(InlayError, match="Unknown scale 'huge'"):
        reproduce("activation-prompts/lemma-1", "huge")
    with pytest.raises(InlayError, match="names 23 recipes"):
        reproduce("activation-prompts")


def test_missing_models_and_data_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with pytest.raises(InlayError) as caught:
        reproduce("activation-prompts/figure-5", "here", Bench(tmp_path / "out", progress=False))
    message = str(caught.value)
    assert "lacks 3 things" in message
    assert "DIR/resnet50_v1" in message
    assert "DIR/vit_tiny_patch16_224" in message
    assert "images/oxford_pets.parquet" in message
    with pytest.raises(InlayError, match="hf download microsoft/resnet-101 --local-dir DIR/resnet-101"):
        reproduce("activation-prompts/figure-2", "paper", Bench(tmp_path / "out", progress=False))
    with pytest.raises(InlayError, match="--models-dir"):
        reproduce("activation-prompts/lemma-1", "smoke", Bench(tmp_path / "out", models_dir=str(tmp_path / "nowhere")))


def test_a_torn_part_is_made_again(tmp_path: Path) -> None:
    first = reproduce("activation-prompts/lemma-1", "smoke", Bench(tmp_path, progress=False))
    (part,) = (tmp_path / "parts").iterdir()
    part.write_text(part.read_text()[:100])
    assert reproduce("activation-prompts/lemma-1", "smoke", Bench(tmp_path, progress=False)).ours == first.ours


def test_every_item_of_the_paper_has_its_recipe() -> None:
    tables = {f"table-{number}" for number in (1, 2, 3, 4, 5, *(f"a{each}" for each in range(2, 9)))}
    figures = {f"figure-{number}" for number in (2, 4, 5, 6, 7, "a1", "a2", "a3")}
    found = {recipe.item for recipe in catalogue.choose("activation-prompts")}
    assert found == tables | figures | {"proposition-1", "lemma-1", "theorem-1"}


def test_here_reads_what_is_kept_unless_told_not_to(tmp_path: Path) -> None:
    outcome = reproduce("activation-prompts/table-3", "here", Bench(tmp_path, progress=False))
    assert "inlay/papers/activation_prompts/kept/table.json" in outcome.ours.notes[0]
    (small,) = [ours for claim, _, ours in outcome.verdicts if claim.text.startswith("Small models")]
    runs = json.loads(kept.path("activation_prompts", "table.json").read_text())["runs"]
    norm, prompt = (outcome.ours.get(row, "CIFAR-10", "ViT") for row in ("NORM-TUNE", "AP"))
    assert norm is not None
    assert prompt is not None
    assert {value / 100 for value in norm.values} <= {run.get("test") for run in runs if run["method"] == "norm"}
    assert (small.judgement, small.clear) == ("holds", True)
    with pytest.raises(InlayError, match="resnet50_v1"):
        reproduce("activation-prompts/table-3", "here", Bench(tmp_path, progress=False), fresh=True)


def test_the_paper_scale_has_the_printed_rates_of_the_prompt() -> None:
    from inlay.papers.activation_prompts.recipes import protocol as p

    assert p.trained(p.VIT_LARGE, "activation-prompt", p.PAPER)["learning_rate"] == 0.01
    assert p.trained(p.RESNET_101, "activation-prompt", p.PAPER)["learning_rate"] == 0.001
    assert "learning_rate" not in p.trained(p.VIT_LARGE, "norm", p.PAPER)
    assert "learning_rate" not in p.trained("embedded:vit", "activation-prompt", p.DIGITS)


def test_the_page_is_up_to_date(document: Any) -> None:
    assert document.page() == document.PAGE.read_text(encoding="utf-8"), document.__doc__


def test_the_models_named_are_those_behind_the_numbers() -> None:
    beside = RecipeScale("", "", ("a/one",), settings={"if_found": {"panel": "two"}}, behind=("three",))
    instead = RecipeScale("", "", ("a/one",), settings={"if_found": "two"}, behind=("three",))
    for scale, found in ((beside, ("one", "two")), (instead, ("two",))):
        assert scale.models_of(False) == ("one",)
        assert scale.models_of(False, lambda name: name == "two") == found
        assert scale.models_of(True) == ("three",)


def test_results_become_data_of_the_page(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: Any
) -> None:
    """A result at `here` is kept with its paper, without the paths of who made it, and the page tells it."""
    outcome = reproduce(
        "activation-prompts/lemma-1", "smoke", Bench(tmp_path / "out", progress=False), command=["secret"]
    )
    as_here = Reproduction(outcome.recipe, "here", None, outcome.ours, 1.0, outcome.folder.parent / "here", ("secret",))
    from inlay.papers.reproduce.perform import keep

    keep(as_here)
    monkeypatch.setattr(kept, "ROOT", tmp_path / "data")
    assert last_verdicts(outcome.recipe) is None
    assert document.here(outcome.recipe) == "Not run yet."
    source = as_here.folder / "lemma-1.json"
    made = json.loads(source.read_text())
    source.write_text(json.dumps(made | {"versions": made["versions"] | {"commit": "0123abc+"}}))
    with pytest.raises(InlayError, match="a tree with changes"):
        document.take(tmp_path / "out")
    source.write_text(json.dumps(made | {"versions": made["versions"] | {"commit": "0123abc"}}))
    assert document.take(tmp_path / "out") == ["activation-prompts/lemma-1"]
    assert list(count_verdicts(last_verdicts(outcome.recipe) or ()).values()) == [2, 2, 0, 0, 0]
    taken = json.loads(path_of("activation-prompts/lemma-1").read_text())
    assert taken["settings"]["summary"] == outcome.recipe.scales["here"].summary
    assert taken["notes"] == list(outcome.recipe.notes)
    assert taken["settings"]["summary"] in document.here(outcome.recipe)
    assert "secret" not in path_of("activation-prompts/lemma-1").read_text()
    rows = document.rows_of(outcome.recipe)
    assert [row[2] for row in rows] == ["yes", "yes", "no", "no"]


def test_a_run_that_dies_leaves_its_cell_empty(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in one method: the others are made, and what failed is noted."""
    from inlay.papers.reproduce import bench

    def dying(spec: Spec, *rest: Any, **more: Any) -> Any:
        if spec.method == "visual-prompt":
            raise RuntimeError("CUDA out of memory\nand more")
        return tune(spec, *rest, **more)

    monkeypatch.setattr(bench, "tune", dying)
    outcome = reproduce("activation-prompts/table-1", "smoke", Bench(out, progress=False))
    assert {row for _, row, _ in outcome.ours.cells} == {"AP"}
    assert set(outcome.ours.failures.values()) == {"RuntimeError: CUDA out of memory"}
    assert "failed: ResNet, VP, OxfordPets: RuntimeError" in (outcome.folder / "table-1.md").read_text()


def test_a_mean_of_other_columns_is_not_the_papers_average() -> None:
    sets = {("", "a", "x"): 1.0, ("", "a", "y"): 2.0, ("", "a", "parameters (M)"): 9.0}
    printed = Results.of({**sets, ("", "a", "Average"): 1.5}, printed=True)
    same = Results.of({**sets, ("", "a", "Average"): 1.5})
    assert with_own_means(printed, same) == same
    other = Results.of({**sets, ("", "a", "z"): 3.0, ("", "a", "Average"): 2.0})
    assert with_own_means(printed, other).cells["", "a", "mean of 3"].mean == 2.0
    assert ("", "a", "Average") not in with_own_means(printed, other).cells
    alone = Results.of({("", "a", "x"): 1.0, ("", "a", "Average"): 1.0})
    assert list(with_own_means(printed, alone).cells) == [("", "a", "x")]


def test_what_the_paper_does_not_print_is_not_judged_by_its_print() -> None:
    recipe = catalogue.recipes()["activation-prompts/table-1"]
    claim = Claim("other models", above("AP", "VP"), printed=False)
    (verdict,) = replace(recipe, claims=(claim,)).judged_as_printed()
    assert (verdict.judgement, verdict.measured) == (UNTESTED, "the paper prints no numbers of it")


def test_lines_of_a_picture_are_told_apart() -> None:
    assert len({style(index) for index in range(98)}) == 98
    assert len({style(index)[:2] for index in range(49)}) == 49


@pytest.mark.slow  # two more processes that import torch
def test_runs_several_at_a_time_are_the_same_runs(tmp_path: Path) -> None:
    """Two workers; and one of two runs cannot be made."""
    lines: list[str] = []
    spec = {"task": "digits", "shots": 2, "max_steps": 1, "evaluations": 1, "batch_size": 2}
    two = Bench(tmp_path, progress=False, say=lines.append, workers=2)
    specs = {
        ("", "probe", "digits"): two.spec("embedded:vit", "linear-probe", **spec),
        ("", "broken", "digits"): two.spec("embedded:vit", "activation-prompt", settings={"layers": 99}, **spec),
    }
    made = two.values(specs, 1, lambda run: run.metrics["test"]["accuracy"])
    assert list(made.cells) == [("", "probe", "digits")]
    assert "99" in made.failures["broken, digits"]
    assert any(line.startswith("already done") for line in lines)
    alone = Bench(tmp_path / "one", progress=False).values(specs, 1, lambda run: run.metrics["test"]["accuracy"])
    assert alone.cells == made.cells
    assert set(alone.failures) == set(made.failures)
    with pytest.raises(InlayError, match="workers=0"):
        reproduce("activation-prompts/lemma-1", "smoke", Bench(tmp_path, workers=0))
