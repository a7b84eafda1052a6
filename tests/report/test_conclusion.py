"""What a report concludes in words, what it says changed since an earlier folder, and folders within folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy.stats import t
from test_report_data import read

from inlay.report.against import changes, describe
from inlay.report.collect import collect
from inlay.report.conclusion import amount, conclude, findings
from inlay.report.html import write_report
from recorded import failed, finished, spec_of

NOISE = (0.0, 0.01, -0.02, 0.015, -0.005)


def five(folder: Path, method: str, value: float, trained: int = 1000, flip: bool = False, **fields: object) -> None:
    for seed, noise in enumerate(NOISE):
        finished(
            folder,
            spec_of(method, seed, **fields),
            value + (-noise if flip else noise),
            portrait__parameters__trained=trained,
        )


def said(folder: Path) -> str:
    (only,) = findings(collect(folder))
    return only


def test_the_best_and_by_how_much(tmp_path: Path) -> None:
    five(tmp_path, "lora", 0.9, 40_000)
    five(tmp_path, "bias", 0.88, 4_000, flip=True)
    five(tmp_path, "norm", 0.7, 400, flip=True)
    gaps = [0.9 + noise - (0.88 - noise) for noise in NOISE]
    half = t.ppf(0.975, 4) * stdev(gaps) / 5**0.5
    assert half > fmean(gaps), "bias is within the noise in this test"
    gaps = [0.9 + noise - (0.7 - noise) for noise in NOISE]
    half = t.ppf(0.975, 4) * stdev(gaps) / 5**0.5
    told = said(tmp_path)
    assert f"lora has the best test accuracy, 0.900 ± 0.017: {100 * fmean(gaps):.1f} ± {100 * half:.1f} points" in told
    assert "better than norm. No significant difference from it: bias." in told
    assert "bias is within the noise and trains 10 times fewer parameters (4k)." in told


def test_all_others_worse_and_none_worse(tmp_path: Path) -> None:
    five(tmp_path / "a", "lora", 0.9)
    five(tmp_path / "a", "norm", 0.5, flip=True)
    assert "points better than norm. All others are worse." in said(tmp_path / "a")
    five(tmp_path / "b", "lora", 0.9, 1000)
    five(tmp_path / "b", "norm", 0.899, 950, flip=True)
    told = said(tmp_path / "b")
    assert "No method is significantly better than another. lora has the highest mean test accuracy" in told
    assert "fewer parameters" not in told, "950 are not worth saying"


def test_one_method_and_few_seeds(tmp_path: Path) -> None:
    finished(tmp_path, spec_of("lora"), 0.9)
    assert said(tmp_path).endswith("lora has test accuracy 0.900 (1 seed).")
    finished(tmp_path, spec_of("bias"), 0.5)
    assert "Too few seeds to compare with it: bias. Use 3 at least." in said(tmp_path)


def test_the_rates_are_said_where_several_were_tried(tmp_path: Path) -> None:
    finished(tmp_path, spec_of("lora"), 0.9)
    finished(tmp_path, spec_of("bias"), 0.8)
    assert "Learning rates" not in said(tmp_path)
    finished(tmp_path, spec_of("lora", learning_rate=0.1), 0.7, metrics__validation__accuracy=0.1)
    assert "Learning rates: lora 0.001 (of 2 tried, by validation), bias 0.001." in said(tmp_path)


def test_an_error_is_given_in_its_own_unit(tmp_path: Path) -> None:
    for seed, noise in enumerate(NOISE):
        for method, value in (("bias", 4.0), ("lora", 2.0)):
            test = {"mse": value + noise * (1 + (method == "lora"))}
            finished(tmp_path, spec_of(method, seed), metric="mse", metrics={"test": test, "validation": test})
    ((of, rows),) = collect(tmp_path).by_set
    (told,) = conclude(of, rows)
    assert told.startswith("lora has the best test mse, 2.000 ±")
    assert ": 2 ± 0.017 better than bias." in told
    assert amount(0.0214, 0.0081, True) == "2.1 ± 0.8 points"
    assert amount(1.234, None, False) == "1.23"


def test_against_an_earlier_folder(tmp_path: Path, typed: Callable[..., tuple[int, str, str]]) -> None:
    five(tmp_path / "old", "lora", 0.8)
    five(tmp_path / "old", "bias", 0.8)
    five(tmp_path / "old", "norm", 0.8)
    five(tmp_path / "old", "full", 0.6)
    five(tmp_path / "new", "lora", 0.9, flip=True, learning_rate=0.01)
    five(tmp_path / "new", "bias", 0.801, flip=True)
    five(tmp_path / "new", "norm", 0.6, flip=True)
    five(tmp_path / "new", "ssf", 0.9)
    found, earlier = collect(tmp_path / "new"), collect(tmp_path / "old")
    told = {each.method: each for each in changes(found, earlier)}
    gaps = [0.1 - 2 * noise for noise in NOISE]
    half = t.ppf(0.975, 4) * stdev(gaps) / 5**0.5
    assert told["lora"].difference == f"+{100 * fmean(gaps):.1f} ± {100 * half:.1f} points"
    assert told["lora"].differing == ("learning rate",)
    assert not told["lora"].other_data
    assert {name: each.verdict for name, each in told.items()} == {
        "lora": "better",
        "bias": "not distinguishable",
        "norm": "worse",
        "ssf": None,
        "full": None,
    }
    assert (told["ssf"].before, told["full"].now) == (None, None)
    sentence = describe(list(told.values()), "old")
    assert sentence.startswith("Against old: better: lora (+10.0 ±")
    assert "worse: norm (-20.0 ±" in sentence
    assert sentence.endswith("new here: ssf; only there: full.")
    status, _, _ = typed("report", "new", "--against", "old", "--out", "r.html")
    assert status == 0
    data = read(tmp_path / "r.html")
    assert data["findings"][-1] == sentence
    assert len(data["against"]["changes"]) == 5


def test_other_rows_of_data_are_said(tmp_path: Path) -> None:
    known = {"source": "nowhere", "notes": [], "schema": {}}
    finished(tmp_path / "old", spec_of("lora"), 0.8, task={**known, "digest": "a" * 64})
    finished(tmp_path / "new", spec_of("lora"), 0.8, task={**known, "digest": "b" * 64})
    (change,) = changes(collect(tmp_path / "new"), collect(tmp_path / "old"))
    assert change.other_data
    assert change.verdict == "too few seeds"


def test_folders_within_folders_are_read_and_copies_counted_once(
    tmp_path: Path, typed: Callable[..., tuple[int, str, str]]
) -> None:
    out = tmp_path / "runs"
    first = finished(out / "monday", spec_of("lora", 0), 0.8)
    finished(out / "monday" / "deep" / "er", spec_of("lora", 1), 0.9)
    finished(out, spec_of("lora", 2), 0.7)
    failed(out / "tuesday", spec_of("bias"), "out of memory")
    shutil.copytree(first.folder, out / "copies" / first.id)
    shutil.copytree(first.folder, out / ".hidden" / "sub" / first.id)
    finished(out / "old", spec_of("lora", 3), 0.1)
    (out / "link").symlink_to(out / "monday")
    data = read(write_report(out, tmp_path / "r.html"))
    assert sorted(run["seed"] for run in data["runs"]) == [0, 1, 2, 3]
    assert len(data["unfinished"]) == 1
    assert any("1 runs lie in more than one folder" in text for text in data["findings"])
    status, _, _ = typed("report", "runs", "--against", "runs/old", "--out", "s.html")
    assert status == 0
    assert sorted(run["seed"] for run in read(tmp_path / "s.html")["runs"]) == [0, 1, 2]


@pytest.mark.parametrize("files", [["data.csv"], ["a/b/c.txt"]])
def test_other_files_among_the_folders_are_no_runs(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    finished(tmp_path / "in" / "here", spec_of(), 0.5)
    assert len(collect(tmp_path).results) == 1
