"""Settings are checked against their method's config before there is a model, and before any data is read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from inlay import InlayError, Spec, compare, tune
from inlay.methods.registry import all_methods, get
from inlay.methods.settings import check_settings
from inlay.workflow.explain import runs as explain_runs
from inlay.workflow.planning import plan

# Neither the file nor the model is there: whoever reads one of them says so, and not what is wrong with the setting.
NOWHERE = Spec(model="nowhere/at-all", data="nowhere.csv", method="lora")


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("lora", {"rank": 16}, r"Unknown setting of method 'lora' 'rank'\..*Known: .*\br\b"),
        ("lora", {"r": 0}, "r=0 leaves lora nothing to train: give a whole number from 1"),
        ("lora", {"r": "x"}, "r='x' will not do: give a whole number"),
        ("lora", {"r": 1.5}, "r=1.5 will not do"),
        ("lora", {"r": True}, "r=True will not do"),
        ("lora", {"r": None}, "r=None will not do"),
        ("lora", {"lora_dropout": 1.5}, "lora_dropout=1.5 will not do: give a share"),
        ("lora", {"target_modules": 3}, "target_modules=3 will not do: give a .*list of words"),
        ("lora", {"target_modules": ["query", 3]}, "target_modules=.*will not do"),
        ("lora", {"bias": "some"}, "bias='some' will not do: give 'none' or 'all' or 'lora_only'"),
        ("lora", {"modules_to_save": 1}, "modules_to_save=1 will not do"),
        ("lora", {"target_modules": "["}, r"target_modules='\[' is no pattern"),
        ("bias", {"target_modules": "("}, r"target_modules='\(' is no pattern"),
        ("ia3", {"feedforward_modules": "("}, r"feedforward_modules='\(' is no pattern"),
        ("lora", {"exclude_modules": "*"}, r"exclude_modules='\*' is no pattern"),
        ("lora", {"modules_to_save": ["("]}, r"modules_to_save='\(' is no pattern"),
        ("lora", {"rank_pattern": {"(": 4}}, r"rank_pattern='\(' is no pattern"),
        ("lora", {"rank_pattern": {"query": "x"}}, "rank_pattern has 'x' for 'query': a rank is a whole number from 1"),
        ("lora", {"rank_pattern": {"query": 0}}, "rank_pattern has 0 for 'query'"),
        ("lora", {"alpha_pattern": {"query": "x"}}, "alpha_pattern has 'x' for 'query': give a number"),
        ("lora", {"target_modules": r"(\w+\.?)+!"}, "takes too long"),
        ("lora", {"target_modules": "(a+)+$"}, "takes too long"),
        ("lora", {"megatron_config": {"a": 1}}, "megatron_config is for models of Megatron"),
        ("lora", {"init_lora_weights": "bogus"}, "init_lora_weights='bogus' .*'pissa_niter_"),
        ("lora", {"init_lora_weights": "pissa_niter_x"}, "init_lora_weights='pissa_niter_x'"),
        ("vera", {"r": -1}, "r=-1 leaves vera nothing to train"),
        ("vera", {"projection_prng_key": "x"}, "projection_prng_key='x' will not do"),
        ("prompt", {"num_virtual_tokens": "x"}, "num_virtual_tokens='x' will not do"),
        ("p-tuning", {"encoder_hidden_size": 0}, "encoder_hidden_size=0 leaves p-tuning nothing"),
        ("multi-lora", {"r": 0}, "r=0"),
        ("adapter", {"bottleneck": 0}, "bottleneck=0"),
        ("bias", {"layers": ["x"]}, "layers=.*will not do: give a list of numbers"),
        ("linear-probe", {"r": 1}, "has no settings"),
        ("full", {"r": 1}, "has no settings"),
    ],
)
def test_what_no_model_could_take_is_refused_without_one(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InlayError, match=message):
        check_settings(get(method), settings)
    with pytest.raises(InlayError, match=message):
        tune(NOWHERE.with_(method=method, settings=settings), progress=False)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("lora", {"r": 4, "lora_alpha": 0.5, "target_modules": ["query"], "init_lora_weights": "pissa_niter_4"}),
        ("lora", {"layers": [1], "init_lora_weights": True, "rank_pattern": {"query": 2}}),
        ("lora", {"layers_to_transform": 1, "modules_to_save": None}),
        ("e2vpt", {"kept": {"1": [[0, [1, 2]]]}}),
        ("gate-vpt", {"gate_initial": 0}),
        ("activation-prompt", {"layers": "auto"}),
    ],
)
def test_what_may_be_passes_without_a_word(method: str, settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_settings(get(method), settings)


@pytest.mark.parametrize("method", all_methods())
def test_a_methods_own_settings_pass(method: str) -> None:
    check_settings(get(method), dict(get(method).settings))


@pytest.mark.parametrize(
    "verb",
    [
        lambda spec: compare(spec, ["lora"], 1, progress=False),
        lambda spec: plan(spec.with_(settings={}), ["lora"], settings={"lora": dict(spec.settings)}),
        lambda spec: explain_runs.layers(spec, progress=False),
        lambda spec: explain_runs.samples(spec, ["lora"], [8], progress=False),
        lambda spec: explain_runs.prompt_norm(spec.with_(method="activation-prompt"), progress=False),
    ],
)
def test_every_verb_that_trains_refuses_before_it_reads(verb: Callable[[Spec], Any]) -> None:
    spec = NOWHERE.with_(settings={"ranc": 0})
    with pytest.raises(InlayError, match=r"Unknown setting of method '[a-z-]+' 'ranc'"):
        verb(spec)


def test_a_comparison_leaves_out_a_method_that_cannot_have_the_settings_and_says_why(review_spec: Spec) -> None:
    planned = plan(review_spec.with_(settings={"r": 2}), ["bias", "lora"], 1)
    assert planned.methods == ["lora"]
    assert "Unknown setting of method 'bias' 'r'" in planned.left_out["bias"]
    assert planned.asked == {"bias"}, "it was asked for: that it does not run is a failure"


def test_numbers_that_are_none_never_reach_a_method() -> None:
    with pytest.raises(InlayError, match=r"settings=.*finite"):
        NOWHERE.with_(settings={"lora_alpha": math.nan})
