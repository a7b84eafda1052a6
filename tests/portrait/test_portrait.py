"""What a run costs is measured right: true counts, true bytes, memory that was really used."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import zoo
from inlay import portrait
from inlay.anatomy import head_modules
from inlay.methods.attach import attach
from inlay.portrait import BLOCKS, PeakMemory, Speed, count_bytes, count_parameters, summarise

MIB = 2**20


def test_parameters_are_counted_by_the_true_tensors() -> None:
    base, _ = zoo.tiny("bert")
    plain = sum(parameter.numel() for parameter in base.parameters())
    head = sum(parameter.numel() for parameter in base.classifier.parameters())
    model = attach(base, "lora", newly_initialised=head_modules(base), settings={"r": 2, "target_modules": ["query"]})
    lora = 3 * (16 * 2 + 2 * 16)
    found = count_parameters(model)
    assert found["trained"] == lora + head
    assert found["total"] == plain + lora, "the head that the trained copy replaces does not count twice"
    assert found["share"] == pytest.approx((lora + head) / (plain + lora))


def test_a_tied_tensor_counts_once() -> None:
    model, _ = zoo.tiny("gpt2", "causal-lm")
    assert model.lm_head.weight is model.transformer.wte.weight
    with_copy = sum(parameter.numel() for _, parameter in model.named_parameters(remove_duplicate=False))
    assert count_parameters(model)["total"] == with_copy - model.lm_head.weight.numel()


def test_saved_bytes_are_those_on_disk(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "inner" / "b").write_bytes(b"x" * 23)
    assert count_bytes(tmp_path) == 123
    assert count_bytes(tmp_path / "nothing") == 0


@pytest.mark.parametrize("sampled", [False, True])
def test_peak_memory_is_the_model_and_what_came_on_top(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if sampled:
        monkeypatch.setattr(portrait, "_reset_maximum", lambda: False)
    elif not portrait._reset_maximum():
        pytest.skip("this kernel has no maximum that can be reset")
    model = nn.Linear(1024, 10 * 1024)  # 40 MiB
    earlier = np.ones(100 * MIB, dtype=np.uint8)
    del earlier
    peak = PeakMemory(model, torch.device("cpu"))
    peak.start()
    on_top = np.ones(60 * MIB, dtype=np.uint8)
    if sampled:
        end = time.monotonic() + 60
        while peak.now() < 98 * MIB and time.monotonic() < end:
            time.sleep(portrait.PERIOD)
    del on_top
    found = peak.stop()
    assert found["how"] == ("sampled" if sampled else "resident set")
    assert 98 * MIB < found["bytes"] < 108 * MIB


def test_peak_memory_remembers_what_an_earlier_process_saw() -> None:
    peak = PeakMemory(nn.Linear(2, 2), torch.device("cpu"))
    assert peak.stop(seen=5)["bytes"] == 5, "never started: nothing of its own"
    peak.start()
    assert peak.stop(seen=10**12)["bytes"] == 10**12


def test_weights_mapped_from_a_file_do_not_count_twice(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({"weight": torch.ones(10 * 1024, 1024), "bias": torch.ones(10 * 1024)}, tmp_path / "m.safetensors")
    model = nn.Linear(1024, 10 * 1024, device="meta")
    model.load_state_dict(load_file(tmp_path / "m.safetensors"), assign=True)
    peak = PeakMemory(model, torch.device("cpu"))
    peak.start()
    model(torch.ones(1, 1024))
    assert 38 * MIB < peak.stop()["bytes"] < 48 * MIB


def test_speed_in_blocks_of_the_run() -> None:
    speed = Speed(100)
    for step in range(1, 101):
        speed.add(step, 8, 99.0 if step == 1 else 0.5 if step <= 50 else 0.25)
    assert len(speed.blocks) == BLOCKS
    rates = [examples / seconds for examples, seconds in speed.blocks.values()]
    assert rates == pytest.approx([16.0] * 5 + [32.0] * 5)
    assert speed.seconds() == pytest.approx(49 * 0.5 + 50 * 0.25)
    resumed = Speed(100, speed.blocks)
    assert resumed.blocks == speed.blocks
    only = Speed(1)
    only.add(1, 8, 2.0)
    assert only.blocks == {"0": [8, 2.0]}


def test_times_and_rates_are_of_the_whole_and_agree() -> None:
    """A block of other examples or another length weighs as much as it is long, and seconds times rate are examples."""
    assert summarise([]) is None
    assert summarise([(8, 0.0)]) is None
    assert summarise([(8, 4.0)]) == {"mean": 2.0, "spread": None, "repetitions": 1, "weight": 4.0}
    blocks = [(10, 1.0), (10, 4.0), (5, 5.0)]
    rate, epoch = summarise(blocks), summarise(blocks, rows=100)
    assert rate is not None
    assert epoch is not None
    assert rate["mean"] == 25 / 10, "all examples by all seconds, not the mean of 10, 2.5 and 1"
    assert epoch["mean"] == 100 * 10 / 25
    assert rate["mean"] * epoch["mean"] == pytest.approx(100)
    assert rate["spread"] == pytest.approx(statistics.stdev([10, 2.5, 1]))
    assert epoch["spread"] == pytest.approx(statistics.stdev([10, 40, 100]))
    assert (rate["weight"], epoch["weight"]) == (10, 25)
