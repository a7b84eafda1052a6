"""A plain Trainer logs the parts of a loss by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import Trainer, TrainingArguments

import inlay
from zoo import tiny


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_plain_trainer_logs_every_part(accumulated: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = tiny("bert", "classification")
    adapted: Any = get_peft_model(model, inlay.InfoPromptConfig())
    rows = [{name: value[i % 3] for name, value in batch.items()} for i in range(12)]
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulated,
        max_steps=4,
        logging_steps=2,
        logging_nan_inf_filter=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(adapted, arguments, train_dataset=rows, callbacks=[inlay.LossParts()])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 2
    for entry in logged:
        whole = entry["task_loss"] + 0.05 * entry["head_loss"] + 0.1 * entry["representation_loss"]
        assert entry["loss"] == pytest.approx(whole, abs=1e-4)
    assert logged[0]["task_loss"] != logged[1]["task_loss"]
