"""Methods over the tasks of a folder: what is one ranking, what is refused, where it is said, how it is drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.report.charts import critical_difference
from inlay.report.collect import collect
from inlay.report.comparable import warnings
from inlay.report.html import write_report
from inlay.report.over_tasks import in_words, rankings
from recorded import failed, finished, spec_of

IMAGES = ("cifar10", "dtd10", "hymenoptera", "oxford-pets", "flowers102", "caltech101", "svhn")
GAIN = {"lora": 0.2, "bias": 0.1, "linear-probe": 0.0}


def benchmark(folder: Path, tasks: Sequence[str] = IMAGES, model: str = "embedded:vit", **fields: object) -> Path:
    """Three methods with two seeds on these tasks: lora is best on all, by unlike amounts."""
    for number, task in enumerate(tasks):
        for method, gain in GAIN.items():
            for seed in range(2):
                value = 0.3 + number / 50 + gain * (1 + number / 10) + seed / 100
                finished(folder, spec_of(method, seed, task=task, model=model, **fields), value)
    return folder


def page_data(page: Path) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found[1])


def test_a_ranking_for_each_model_and_number_of_examples(tmp_path: Path) -> None:
    """The same task on another model is no further task."""
    benchmark(tmp_path)
    benchmark(tmp_path, IMAGES[:6], model="embedded:resnet")
    benchmark(tmp_path, IMAGES[:5], shots=16)
    benchmark(tmp_path, IMAGES[:4], shots=64)
    ranked = rankings(collect(tmp_path))
    assert [(each.found.title, len(each.found.tasks)) for each in ranked] == [
        ("embedded:vit, all examples", 7),
        ("embedded:resnet, all examples", 6),
        ("embedded:vit, 16 examples", 5),
    ]
    assert all(each.found.methods == ("lora", "bias", "linear-probe") for each in ranked)
    assert all(each.found.ranks == (1.0, 2.0, 3.0) for each in ranked)
    assert [each.found.cliques for each in ranked] == [(), ((0, 2),), ((0, 2),)]
    assert len(rankings(collect(tmp_path), 2)) == 4
    assert (
        "Methods are not ranked over tasks (embedded:vit, 64 examples): a ranking needs 5 tasks, and there are 4."
        in (in_words(rankings(collect(tmp_path), 2)))
    )


def test_a_method_counts_with_its_chosen_variant(tmp_path: Path) -> None:
    """A learning rate that is best on test, but not on validation, moves no rank."""
    benchmark(tmp_path)
    for task in IMAGES:
        for seed in range(2):
            spec = spec_of("linear-probe", seed, task=task, learning_rate=0.1)
            finished(tmp_path, spec, 0.99, metrics__validation__accuracy=0.1)
    (ranked,) = rankings(collect(tmp_path))
    assert ranked.found.methods == ("lora", "bias", "linear-probe")


def test_a_metric_that_improves_downwards_is_turned_round(tmp_path: Path) -> None:
    """Perplexities on some tasks: the order is the same, and only signs are tested."""
    benchmark(tmp_path, ("e2e", "webnlg", "dart", "gsm8k"))
    for task in ("wikitext2", "ptb", "wikitext103"):
        for method, gain in GAIN.items():
            metrics = {"test": {"perplexity": 30 - 10 * gain}, "validation": {"perplexity": 31.0}}
            finished(tmp_path, spec_of(method, task=task), metric="perplexity", metrics=metrics)
    (ranked,) = rankings(collect(tmp_path))
    assert (ranked.found.methods, ranked.found.test, ranked.share) == (("lora", "bias", "linear-probe"), "sign", False)
    assert {(pair.better, pair.worse) for pair in ranked.found.pairs} == {(7, 0)}


def test_a_task_under_two_protocols_is_no_two_tasks(tmp_path: Path) -> None:
    benchmark(tmp_path, IMAGES[:5])
    benchmark(tmp_path, IMAGES[:5], protocol="vtab-1k")
    assert [len(each.found.tasks) for each in rankings(collect(tmp_path))] == [5, 5]


def scored(folder: Path, spec: Spec, value: float, metric: str) -> None:
    split = {metric: value, "loss": 0.5}
    finished(folder, spec, metric=metric, metrics={"validation": split, "test": split | {"accuracy": value}})


def test_a_run_with_another_pooling_takes_no_task_away(tmp_path: Path) -> None:
    """Nor does one with another metric: only the tasks that come twice are parted, and what is left out is named."""
    benchmark(tmp_path, IMAGES[:5])
    for method, gain in GAIN.items():
        for seed in range(2):
            for task, metric in (("cola", "matthews"), ("stsb", "pearson")):
                scored(tmp_path, spec_of(method, seed, task=task), 0.4 + gain, metric)
    finished(tmp_path, spec_of("lora", task="dtd10", pooling="first"))
    scored(tmp_path, spec_of("ssf", task="cifar10"), 0.3, "balanced_accuracy")
    (ranked,) = rankings(collect(tmp_path))
    assert ranked.found.refusal is None
    assert set(ranked.found.tasks) == {*IMAGES[:5], "cola", "stsb"}
    told = ranked.notes[0].removeprefix("Left out, as too few tasks have such results: ").removesuffix(".")
    assert set(told.split(", ")) == {"cifar10 (balanced_accuracy)", "dtd10 (pooling first)"}
    assert ranked.notes[0] in in_words([ranked])[0]


def test_a_method_has_the_mean_of_the_seeds_that_all_have(tmp_path: Path) -> None:
    """Seeds 3 and 4 are hard, and bias failed there: lora, better on every common seed, is the better one."""
    for number, task in enumerate(IMAGES):
        for seed in range(5):
            value = (0.9 if seed < 3 else 0.4) + number / 1000
            finished(tmp_path, spec_of("lora", seed, task=task), value + 0.02)
            if seed < 3:
                finished(tmp_path, spec_of("bias", seed, task=task), value)
            else:
                failed(tmp_path, spec_of("bias", seed, task=task), "loss is nan")
    found = collect(tmp_path)
    (ranked,) = rankings(found)
    (pair,) = ranked.found.pairs
    assert (ranked.found.methods, pair.favours, pair.better, pair.worse) == (("lora", "bias"), "lora", 7, 0)
    assert pair.gap == pytest.approx(0.02)
    assert ranked.notes == (
        f"Only seeds that all methods have on a task count; others are left out on {', '.join(IMAGES)}.",
    )
    (seeds,) = [each.text for each in warnings(found) if each.title == "Seeds"]
    assert "ranks over tasks over the common ones" in seeds


def test_methods_without_a_common_seed_are_not_ranked(tmp_path: Path) -> None:
    benchmark(tmp_path, IMAGES[:5])
    for method, seeds in (("lora", (0, 1)), ("bias", (1, 2)), ("linear-probe", (3,))):
        for seed in seeds:
            finished(tmp_path, spec_of(method, seed, task="svhn"))
    (ranked,) = rankings(collect(tmp_path))
    assert ranked.found.missing == (("svhn", "linear-probe"),)
    assert ranked.notes == ("The methods have no seed in common on svhn.",)
    assert in_words([ranked])[0].endswith(ranked.notes[0])


def test_a_task_on_which_every_run_failed_is_missing(tmp_path: Path) -> None:
    """Only on the same model, with as many examples, of the same head, and by methods that are ranked."""
    benchmark(tmp_path, IMAGES[:4])
    for method in GAIN:
        failed(tmp_path, spec_of(method, task="oxford-flowers"), "shots=1000 asks for more")
    failed(tmp_path, spec_of("lora", task="svhn", shots=3), "no")
    failed(tmp_path, spec_of("lora", task="svhn", model="embedded:resnet"), "no")
    failed(tmp_path, spec_of("lora", task="wnut17"), "no")
    failed(tmp_path, spec_of("ssf", task="svhn"), "no")
    (ranked,) = rankings(collect(tmp_path))
    assert set(ranked.found.missing) == {("oxford-flowers", method) for method in GAIN}
    assert ranked.found.refusal is not None
    assert "3 of 15 results are missing" in ranked.found.refusal


def test_a_failed_task_of_an_unknown_kind(tmp_path: Path) -> None:
    """With one head it is missing there; with several it is named, as is one with another pooling."""
    benchmark(tmp_path, IMAGES[:5])
    failed(tmp_path, spec_of("lora", task="cb", pooling="first"), "no")
    (ranked,) = rankings(collect(tmp_path))
    assert ranked.found.refusal is None
    assert ranked.notes[0] == "Left out, as no run has a result: cb."
    failed(tmp_path, spec_of("lora", task=None, data="own.csv"), "no")
    (ranked,) = rankings(collect(tmp_path))
    assert {task for task, _ in ranked.found.missing} == {"own.csv"}
    finished(tmp_path, spec_of("lora", task="wnut17"))
    (ranked,) = rankings(collect(tmp_path))
    assert ranked.found.refusal is None
    assert ranked.notes[0] == "Left out, as no run has a result: cb, own.csv."


def test_tasks_of_different_heads_are_ranked_apart(tmp_path: Path) -> None:
    """A method that cannot tag words is not missing from a ranking over classes."""
    benchmark(tmp_path, ("rte", "mrpc", "cola", "cb", "stsb"))
    for method in ("lora", "bias"):
        finished(tmp_path, spec_of(method, task="wnut17"))
        finished(tmp_path, spec_of(method, task="conll2003"))
    first, second = rankings(collect(tmp_path), 2)
    assert (first.found.title, first.found.tasks) == (
        "embedded:vit, all examples, classification",
        ("rte", "mrpc", "cola", "cb", "stsb"),
    )
    assert len(first.found.methods) == 3
    assert (second.found.title, len(second.found.tasks)) == ("embedded:vit, all examples, token-classification", 2)


def test_runs_of_several_tasks_are_not_counted(tmp_path: Path) -> None:
    benchmark(tmp_path, IMAGES[:5])
    known = {"source": "nowhere", "digest": "d" * 64, "notes": [], "metric": "accuracy"}
    spec = spec_of("lora", task=None, tasks=("rte", "cb"))
    metrics = {"test": {"average": 0.5}, "validation": {"average": 0.5}}
    finished(tmp_path, spec, metric="average", metrics=metrics, tasks=dict.fromkeys(("rte", "cb"), known))
    (ranked,) = rankings(collect(tmp_path))
    assert ranked.found.tasks == IMAGES[:5]


def test_the_page_has_it(tmp_path: Path) -> None:
    """First in words; refusals with what is missing; without paths of its maker's disk."""
    runs = benchmark(tmp_path / "runs", model="/home/alice/secret/vit")
    page = write_report(runs, tmp_path / "report.html")
    data = page_data(page)
    (ranked,) = data["over_tasks"]
    assert ranked["title"] == "vit, all examples"
    assert (ranked["ranks"], ranked["places"], ranked["share"]) == ([1.0, 2.0, 3.0], list(range(7)), True)
    assert data["findings"][0].startswith(
        "Over 7 tasks (vit, all examples) the methods differ (Friedman test, p < 0.001)"
    )
    assert "alice" not in page.read_text()
    assert data["families"] == {"lora": "low-rank", "bias": "scale and shift", "linear-probe": "head"}
    assert {(each["kind"], each["data"]) for each in data["sets"]} == {("image-classification", "images")}
    finished(runs, spec_of("norm", task="cifar10", model="/home/alice/secret/vit"), 0.4)
    data = page_data(write_report(runs, tmp_path / "report.html"))
    assert data["over_tasks"][0]["missing"] == [[task, "norm"] for task in IMAGES[1:]]
    assert data["over_tasks"][0]["refusal"].startswith(
        "6 of 28 results are missing: norm on dtd10, norm on hymenoptera"
    )


def test_tasks_at_chance_and_few_seeds_are_told(tmp_path: Path) -> None:
    """Where the majority class does as well as every method, an order says little."""
    benchmark(tmp_path)
    (ranked,) = rankings(collect(tmp_path))
    assert ranked.notes == ("Some scores are of 2 seeds: use 3 or more.",)
    for method in GAIN:
        for seed in range(3):
            chance = {"answer": "cat", "examples": 50, "metrics": {"accuracy": 0.9}}
            finished(tmp_path, spec_of(method, seed, task="eurosat"), 0.7, chance=chance)
    (ranked,) = rankings(collect(tmp_path))
    assert ranked.notes[0].startswith("On 1 of these tasks no method is above the majority class")
    assert ranked.notes[0].endswith(": eurosat.")
    assert in_words([ranked])[0].endswith(" ".join(ranked.notes))
    assert page_data(write_report(tmp_path, tmp_path / "r.html"))["over_tasks"][0]["notes"] == list(ranked.notes)


def test_kinds_of_older_and_odd_runs(tmp_path: Path) -> None:
    """The record's own kind counts; a named task has it from the catalogue; otherwise it is not known."""
    known = {"source": "x", "digest": "d" * 64, "notes": []}
    finished(tmp_path, spec_of(task=None, data="a.csv"), task=known | {"schema": {"kind": "ordinal"}})
    finished(tmp_path, spec_of(task=None, data="b.csv"), task=known | {"schema": {}})
    finished(tmp_path, spec_of(task="rte"))
    finished(tmp_path, spec_of("of-somebody-else", task="rte"))
    data = page_data(write_report(tmp_path, tmp_path / "r.html"))
    assert {each["task"]: (each["kind"], each["data"]) for each in data["sets"]} == {
        "a.csv": ("ordinal", "texts"),
        "b.csv": ("not known", "not known"),
        "rte": ("pair-classification", "texts"),
    }
    assert data["families"]["of-somebody-else"] == "not known"
    assert data["over_tasks"] == []


def test_the_diagram_has_every_method_and_every_bar(tmp_path: Path) -> None:
    """In the SVG: the names with their ranks, and a bar for each clique; the same ranking is the same file."""
    benchmark(tmp_path / "runs")
    benchmark(tmp_path / "runs", IMAGES[:5], shots=16)
    found = [each.found for each in rankings(collect(tmp_path / "runs"))]
    written = critical_difference.write(found, tmp_path / "new" / "ranks.svg")
    assert [path.name for path in written] == ["ranks.svg", "ranks-2.svg"]
    drawn = [path.read_text() for path in written]
    assert ElementTree.fromstring(drawn[0]).tag.endswith("svg")
    for text in drawn:
        for told in ("lora  1.00", "bias  2.00", "3.00  linear-probe"):
            assert f"<!-- {told} -->" in text
    bars = [len(re.findall("stroke: #d55e00; stroke-width: 4", text)) for text in drawn]
    assert bars == [len(each.cliques) for each in found] == [0, 1]
    assert critical_difference.write(found, tmp_path / "again.svg")[0].read_text() == drawn[0]


def test_the_command_draws_and_refuses(tmp_path: Path, typed: Callable[..., tuple[int, str, str]]) -> None:
    benchmark(tmp_path / "runs")
    benchmark(tmp_path / "few", IMAGES[:3])
    status, _, said = typed("report", "runs", "--ranks", "ranks.png")
    assert (status, "ranks in ranks.png" in said) == (0, True)
    assert (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")
    status, _, said = typed("report", "few", "--ranks", "ranks.svg", "--out", "few.html")
    assert status == 2
    assert "There is no ranking to draw in ranks.svg. Methods are not ranked over tasks" in said
    assert "a ranking needs 5 tasks, and there are 3" in said
    assert not (tmp_path / "few.html").exists()
    assert typed("report", "runs", "--ranks", "ranks.doc")[0] == 2
    finished(tmp_path / "runs", spec_of("norm", task="cifar10"))
    failed(tmp_path / "runs", spec_of("ssf", task="cifar10"), "no")
    assert "6 of 28 results are missing" in typed("report", "runs", "--ranks", "ranks.svg")[2]
    status, _, said = typed("report", "runs", "--ranks", "ranks.svg", "--methods", "lora,bias,linear-probe")
    assert (status, "42 runs in report.html" in said, "without a result" in said) == (0, True, False)
    status, _, said = typed("report", "runs", "--methods", "lora,bais")
    assert (status, "Unknown method among these runs 'bais'. Did you mean 'bias'" in said) == (2, True)
    with pytest.raises(InlayError, match="no runs of single tasks"):
        critical_difference.write([], tmp_path / "x.svg")
