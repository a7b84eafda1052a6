"""What prompts carry and where they were trained: the numbers behind InfoPrompt's figures 1 and 2."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inlay import InlayError, Spec, backbones, tune
from inlay.methods.infoprompt.config import InfoPromptConfig
from inlay.methods.infoprompt.layer import InfoPromptLayer
from inlay.methods.infoprompt.pieces import Site
from inlay.papers.infoprompt.explain import charts
from inlay.papers.infoprompt.explain import information as explain_prompts
from inlay.papers.infoprompt.explain.information import Information, Source, fitted_bounds, information
from inlay.papers.infoprompt.explain.landscape import gamma, landscape, roughness, spec_of
from inlay.report.charts import explanations as charts_explain


def layer_for(size: int) -> Any:
    words = torch.nn.Embedding(4, size)
    site = Site(InfoPromptConfig(), None, words, size, 2, False, "mean", "first", False)
    return SimpleNamespace(pieces={"default": SimpleNamespace(site=site)})


def test_the_critic_finds_information_where_there_is_some_and_none_where_there_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randn(200, 2, 6, generator=generator)
    without = torch.randn(200, 6, generator=generator)
    told, same = without + 2 * prompts.mean(1), without.clone()

    def bound(z: torch.Tensor) -> float:
        known, fresh = ((prompts[rows], z[rows], without[rows]) for rows in (slice(0, 100), slice(100, 200)))
        values = fitted_bounds(layer_for(6), known, fresh, 300, 16, rate=1e-2)
        assert len(values) == 100
        assert max(values) <= math.log(16) + 1e-6
        return sum(values) / 100

    assert bound(told) > 0.5
    assert bound(same) < 0.1


@pytest.mark.parametrize(("least", "full"), [(0.5, False), (3.45, True)])
def test_a_bound_at_its_end_is_said_to_tell_nothing(least: float, full: bool) -> None:
    sources = [Source("warp", (3.46, 3.46)), Source("random", (least, least))]
    found = Information(Spec(model="a", task="rte", method="warp"), sources, 32, 2, 10)
    assert "at most log 32 = 3.466" in found.sentence
    assert ("tells no difference" in found.sentence) == full


def test_sources_are_compared_on_the_same_texts(
    review_spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        tune(review_spec.with_(method=method, settings=own), tmp_path / "runs", progress=False)
        for method, own in (("infoprompt", {"num_negatives": 6}), ("warp", {}))
    ]
    looked, seen = explain_prompts.observe, []

    def noted(model: Any, task: Any, backbone: Any, split: str, examples: int, run: Any) -> Any:
        seen.append((split, task.split(split)["body"], run.id))
        return looked(model, task, backbone, split, examples, run)

    load, encode, done = backbones.load_for, InfoPromptLayer._encoded, Counter[str]()

    def loaded(*given: Any) -> Any:
        done["loaded"] += 1
        return load(*given)

    def encoded(*given: Any) -> Any:
        done["encoded"] += 1
        return encode(*given)

    monkeypatch.setattr(backbones, "load_for", loaded)
    monkeypatch.setattr(InfoPromptLayer, "_encoded", encoded)
    monkeypatch.setattr(explain_prompts, "observe", noted)
    found = information(
        [run.id for run in runs],
        words=["w1 w2"],
        examples=8,
        steps=5,
        store=tmp_path / "runs",
        progress=False,
    )
    assert [source.name for source in found.sources] == ["infoprompt", "warp", "'w1 w2'", "random"]
    assert len({len(source.values) for source in found.sources}) == 1
    assert seen == seen[:2] * 4, "the first run's texts, drawn by its seed"
    texts = sum(min(8, len(split)) for _, split, _ in seen[:2])
    assert done == {"loaded": 1, "encoded": texts}, "one model for all sources, and the states without prompts once"
    alone = information([runs[0].id], examples=8, steps=5, store=tmp_path / "runs", progress=False)
    assert alone.sources == [found.sources[0], found.sources[3]], "a source leaves nothing behind for the next"
    assert found.negatives == 6, "the first run's K, for all of them"
    assert all(value <= found.most + 1e-6 for source in found.sources for value in source.values)
    assert "infoprompt" in found.sentence
    charts_explain.write(found, tmp_path / "picture", picture=charts.information)
    assert {path.suffix for path in (tmp_path / "picture").iterdir()} == {".png", ".svg", ".csv", ".json"}
    other = tune(review_spec, tmp_path / "runs", progress=False)
    with pytest.raises(InlayError, match="no prompts in the text"):
        information([other.id], store=tmp_path / "runs", progress=False)


def test_runs_that_cannot_be_compared_are_refused(review_spec: Spec, reviews: Path, tmp_path: Path) -> None:
    spec = review_spec.with_(method="warp", max_steps=1)
    few = reviews.with_name("few.csv")
    few.write_text("".join(reviews.read_text().splitlines(keepends=True)[:40]))
    others = {
        "other validation or test texts": spec.with_(data=str(few)),
        "seed 1; that one .*seed 0": spec.with_(seed=1),
        "reads Z elsewhere, at the first": spec.with_(settings={"state": "first"}),
    }
    first = tune(spec, tmp_path / "runs", progress=False)
    for words, other in others.items():
        second = tune(other, tmp_path / "runs", progress=False)
        with pytest.raises(InlayError, match=words):
            information([first.id, second.id], store=tmp_path / "runs", progress=False)
    with pytest.raises(InlayError, match="at least 2"):
        information([first.id], negatives=1, store=tmp_path / "runs", progress=False)


def test_sources_of_one_method_have_names_of_their_own(review_spec: Spec, tmp_path: Path) -> None:
    spec = review_spec.with_(method="warp", max_steps=1)
    rates = [tune(spec.with_(learning_rate=rate), tmp_path / "runs", progress=False) for rate in (0.1, 0.2)]
    runs = [*rates, tune(spec.with_(settings={"initial": "uniform"}), tmp_path / "runs", progress=False)]
    found = information([run.id for run in runs], examples=8, steps=1, store=tmp_path / "runs", progress=False)
    assert [source.name for source in found.sources] == [
        f"warp (defaults, {rates[0].id})",
        f"warp (defaults, {rates[1].id})",
        "warp (initial=uniform, seed 0)",
        "random",
    ]
    assert len(found.details()["means"]) == 4


def test_the_landscape_has_surfaces_and_the_path_that_training_takes(review_spec: Spec, tmp_path: Path) -> None:
    spec = review_spec.with_(method="infoprompt")
    found = landscape(spec, examples=4, steps=3, grid=3, progress=False)
    assert list(found.values) == ["task", "representation"]
    assert [path.name for path in found.paths] == ["gamma = 0.05", "gamma = 0"]
    for path in found.paths:
        assert path.steps == (0, 1, 2, 3)
        assert len(set(path.points)) == 4, "the prompt moves"
    assert found.paths[0].points[0] == found.paths[1].points[0], "both begin at the same place"
    assert all(abs(x) <= found.x[-1] and abs(y) <= found.y[-1] for path in found.paths for x, y in path.points)
    charts_explain.write(found, tmp_path / "picture", picture=charts.landscape)
    assert (tmp_path / "picture" / "landscape.png").stat().st_size > 1000


def test_a_method_without_a_head_loss_has_one_path_and_its_own_gamma(review_spec: Spec) -> None:
    found = landscape(review_spec.with_(method="warp"), examples=4, steps=1, grid=3, progress=False)
    assert [path.name for path in found.paths] == ["gamma = 0"]
    assert list(found.values) == ["task"]
    assert gamma(review_spec.with_(method="warp", settings={"gamma": 0.2})) == 0.2
    assert gamma(review_spec.with_(method="infoprompt")) == 0.05


def test_a_runs_file_does_not_allow_a_models_own_code_to_run(review_spec: Spec, tmp_path: Path) -> None:
    spec = review_spec.with_(method="warp", max_steps=1, trust_remote_code=True)  # as a stranger's run may say
    run = tune(spec, tmp_path / "runs", progress=False)
    with pytest.raises(InlayError, match="--trust-remote-code"):
        spec_of(run)
    assert spec_of(run, trust_remote_code=True).trust_remote_code
    plain = tune(spec.with_(trust_remote_code=False), tmp_path / "runs", progress=False)
    assert not spec_of(plain).trust_remote_code


def test_roughness_is_none_of_a_plane_and_grows_with_bends() -> None:
    plane = [[2.0 * i + j for j in range(5)] for i in range(5)]
    waves = [[math.sin(3 * i) + math.cos(3 * j) for j in range(5)] for i in range(5)]
    assert roughness(plane) == pytest.approx(0)
    assert roughness(waves) > 0.1
