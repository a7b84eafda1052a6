"""`runs list` filters and sorts; a dry run says what is finished and how long the rest takes; suggestions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from inlay import InlayError, Spec
from inlay.methods import registry
from inlay.methods.settings import check_settings
from inlay.records.store import Store
from inlay.workflow.forecast import Forecast, forecast, in_words
from inlay.workflow.run_listing import choose
from inlay.workflow.sweep import read
from inlay.workflow.tune import tune

Typed = Callable[..., tuple[int, str, str]]
QUICK = ("--max-steps", "2", "--batch-size", "8")


def line_of(out: str, *words: str) -> list[str]:
    (found,) = [line.split("\t") for line in out.splitlines() if all(word in line for word in words)]
    return found


def test_runs_are_listed_filtered_and_sorted(typed: Typed, text_model: Path, reviews: Path, tmp_path: Path) -> None:
    given = ("--model", text_model, "--data", reviews, "--text", "body", "--label", "stars", *QUICK)
    for more in (("--method", "norm", "--lr", "0.5"), ("--method", "bias", "--shots", "12"), ("--method", "bias")):
        assert typed("tune", *given, *more)[0] == 0
    _, out, _ = typed("runs", "list")
    head = out.splitlines()[0].split("\t")
    assert head == ["run", "status", "made", "learning rate", "examples", "result", "trained"]
    norm = line_of(out, "norm")
    assert norm[1] == "finished"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", norm[2])
    assert norm[3:5] == ["0.5", "43"]
    assert sorted(line.split("\t")[4] for line in out.splitlines()[1:]) == ["12", "43", "43"]
    for wanted, count in (
        (("norm",), 1),
        (("method=bias",), 2),
        (("method=bias", "shots=12"), 1),
        (("status=finished",), 3),
        (("learning_rate=0.5",), 1),
        (("shots=none",), 2),
        (("text=body", "label=stars"), 3),
        (("nothing",), 0),
    ):
        _, out, err = typed("runs", "list", *(word for each in wanted for word in ("--filter", each)))
        assert len(out.splitlines()) == 1 + count, wanted
        assert f"{count} of 3 runs" in err
    runs = Store(tmp_path / "runs").list()
    scores = [run.metrics["test"]["accuracy"] for run in choose(runs, (), "result")]
    assert scores == sorted(scores, reverse=True)
    assert [run.spec.learning_rate for run in choose(runs, (), "rate")][-1] == 0.5
    assert choose(runs, (), "examples")[0].spec.shots == 12
    assert [run.id for run in choose(runs, (), "name")] == sorted(run.id for run in runs)
    assert choose(runs, ()) == runs
    for words, message in (
        (("--sort", "score"), "Unknown order 'score'"),
        (("--filter", "metod=bias"), "Did you mean 'method'"),
        (("--filter", "seed=x"), "'x' is compared with a number"),
    ):
        status, _, err = typed("runs", "list", *words)
        assert (status, message in err) == (2, True), err


def test_a_dry_run_knows_what_is_finished(typed: Typed, text_model: Path, reviews: Path, tmp_path: Path) -> None:
    given = ("--model", text_model, "--data", reviews, "--text", "body", "--label", "stars", *QUICK)
    dry = ("compare", *given, "--methods", "bias,norm", "--seeds", "2", "--dry-run")
    _, out, err = typed(*dry)
    assert [line.split("\t")[-1] for line in out.splitlines()] == ["status", *["to make"] * 4]
    assert "4 runs in 1 comparison. 0 finished already and not repeated, 4 to make; how long they take is not" in err
    assert typed("tune", *given, "--method", "bias")[0] == 0
    _, out, err = typed(*dry)
    assert line_of(out, "\tbias\t", "\t0\tits own\t")[-1] == "finished"
    assert line_of(out, "\tbias\t", "\t1\tits own\t")[-1] == "to make"
    seconds = Store(tmp_path / "runs").list()[0].record["seconds"]
    assert f"1 finished already and not repeated, 3 to make: about {seconds:.0f} s by finished runs like them" in err
    assert "and 2 of which none is finished here" in err
    base = Spec(str(text_model), "bias", data=str(reviews), text=("body",), label="stars", max_steps=2, batch_size=8)
    found = forecast([base, base.with_(seed=1), base.with_(data="nowhere.csv")], tmp_path / "runs")
    assert (found.status, found.unknown) == (("finished", None, None), 1)
    assert found.seconds == pytest.approx(seconds)


def test_an_interrupted_run_is_told_apart(text_model: Path, reviews: Path, tmp_path: Path) -> None:
    base = Spec(str(text_model), "bias", data=str(reviews), text=("body",), label="stars", max_steps=2, batch_size=8)
    with pytest.raises(BaseException):  # noqa: B017, PT011
        tune(base, tmp_path / "runs", progress=False, stop=lambda: True)
    assert forecast([base], tmp_path / "runs").status == ("interrupted",)


def test_durations_in_words() -> None:
    assert in_words(Forecast(("finished",), 0, 0)) == "It is finished already."
    assert in_words(Forecast(("finished",) * 3, 0, 0)) == "All 3 are finished already and not repeated."
    assert "about 30.0 min by" in in_words(Forecast((None,) * 2, 3600, 0), workers=2)
    assert "about 2.0 h by" in in_words(Forecast((None,), 7200, 0))


def test_all_mistakes_of_a_sweep_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "model: embedded:vit\nmodels: [embedded:resnet]\nmethods: [linear-probe, loora]\nlearning_rate: [0.1, 0.2]\n"
        "seeds: two\nbaseline: bias\n"
    )
    with pytest.raises(InlayError) as error:
        read(path)
    told = str(error.value)
    assert "6 mistakes:" in told
    for message in (
        "learning_rate is one number: several are learning_rates.",
        "seeds: 'two' will not do",
        "model and models contradict each other",
        "task is missing",
        "baseline: 'bias' is not among the methods",
        "Unknown method 'loora'. Did you mean 'lora'",
    ):
        assert message in told


@pytest.mark.parametrize(("name", "meant"), [("rank", "r"), ("alpha", "lora_alpha"), ("dropout", "lora_dropout")])
def test_other_names_of_settings_are_understood(name: str, meant: str) -> None:
    with pytest.raises(InlayError, match=rf"Unknown setting .*{name}.* {name} is called '{meant}' here\."):
        check_settings(registry.get("lora"), {name: 8})
    with pytest.raises(InlayError) as error:
        check_settings(registry.get("bias"), {name: 8})
    assert "is called" not in str(error.value)


@pytest.mark.parametrize("what", ["cka", "attention-distance"])
def test_commands_that_only_look_offer_nothing_of_training(typed: Typed, what: str) -> None:
    status, out, _ = typed("explain", what, "--help")
    offered = set(re.findall(r"^ *(?:-\w, )?--([\w-]+)", out, re.MULTILINE))
    assert status == 0
    assert {"model", "task", "precision", "max-length"} <= offered
    assert not offered & {"epochs", "set", "layers", "max-eval", "pack", "group-by-length", "trunk-cache", "augment"}
