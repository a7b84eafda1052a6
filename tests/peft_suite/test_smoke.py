"""The harness itself, and a handful of PEFT's tests where a checkout is at hand (`PEFT=<checkout> pytest ...`)."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from peft import IA3Config, LNTuningConfig, LoraConfig

import inlay
from inlay.errors import InlayError
from peft_suite import page, plugin, stand_ins
from peft_suite.__main__ import check_checkout, main, run

NAMES = ["test_name", "model_id", "config_cls", "config_kwargs"]


def test_our_config_stands_where_lora_stood_and_nowhere_else() -> None:
    rows = [
        ("one", "MLP", LoraConfig, {"target_modules": ["lin0"], "r": 4}),
        ("the same but for LoRA's own settings", "MLP", LoraConfig, {"target_modules": ["lin0"], "use_dora": True}),
        ("another model", "Conv2d", LoraConfig, {"target_modules": ["lin0"]}),
        ("another method", "MLP", IA3Config, {"target_modules": ["lin0"]}),
    ]
    stand_in = stand_ins.StandIn("bias")
    found = stand_in.rows(NAMES, rows, {}, plain=True)
    assert found is not None
    assert [row[:3] for row in found] == [
        ("one", "MLP", inlay.BiasTuningConfig),
        ("another model", "Conv2d", inlay.BiasTuningConfig),
    ]
    assert all(row[3] == {"target_modules": ["lin0"]} for row in found)
    assert stand_in.rows(NAMES, rows[3:], {}, plain=True) is None
    (config,) = stand_in.rows(["config"], [LoraConfig(target_modules=["a"], init_lora_weights=False)], {}, False) or [0]
    assert stand_in.is_ours(config)
    assert config.init_weights is False
    assert "init_weights" not in config.to_dict()


def test_norms_stand_where_peft_tunes_norms_and_the_control_is_lora_itself() -> None:
    rows = [(LoraConfig, {"target_modules": ["lin0"]}), (LNTuningConfig, {"target_modules": ["norm"]})]
    names = ["config_cls", "config_kwargs"]
    assert stand_ins.StandIn("norm").rows(names, rows, {}, True) == [
        (inlay.NormTuningConfig, {"target_modules": ["norm"]})
    ]
    assert stand_ins.StandIn("lora").rows(names, rows, {}, False) == rows[:1]


def test_the_page_shows_the_counts_and_the_table_as_they_are_and_there_is_no_deviation() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written(text) == text, "run `make test-peft PEFT=<checkout> RECORD=1`"
    table = tomllib.loads(plugin.REFUSALS.read_text(encoding="utf-8"))
    assert all(entry["why"].endswith(".") for kind in table.values() for entry in kind)
    counts = page.kept_counts()
    assert sorted(counts) == sorted(stand_ins.methods())
    assert all(entry["deviations"] == 0 for entry in counts.values())


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InlayError, match=r"lacks tests/__init__\.py"):
        check_checkout(tmp_path)
    assert main(["--peft", str(tmp_path)]) == 2
    assert "git clone" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["lora", "bias"])
def test_some_of_pefts_tests(method: str) -> None:
    if not os.environ.get("PEFT"):
        pytest.skip("needs a checkout of PEFT: PEFT=<checkout>, see docs/peft-suite.md")
    counts = run(check_checkout(Path(os.environ["PEFT"])), method, ["-k", "TestPeftCustomModel and test_merge_layers"])
    assert not counts["broken"]
    assert not counts["deviations"]
    assert counts["passed"] > 10
