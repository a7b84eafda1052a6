"""What `inlay tune` costs on top of a bare loop with Transformers' Trainer.

Both do the same work: load a backbone and a data set, attach a LoRA, train, evaluate on the validation split after each
epoch and on the test split at the end, save the adapter. The bare loop is what a user would write: the stock Trainer
with its own evaluation and metrics, no checkpoints, no record, no portrait. They take turns, each in this process and
after one of each to warm up. Three ratios: of the processor's time (medians), which other work on the machine hardly
touches; of the clock's time, medians; and of the clock's time, the fastest of each, since other work can only add to
it. The two by the clock agree on a quiet machine; the load is recorded with them. The bound is 1.03.

    python benchmarks/tune_overhead.py      # prints the ratios, writes benchmarks/results/tune_overhead.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BOUND = 1.03
RESULTS = Path(__file__).parent / "results" / "tune_overhead.json"


def bare(spec: Any, folder: Path) -> dict[str, float]:
    """The loop that a user of the Trainer would write."""
    from transformers import Trainer, TrainingArguments, set_seed

    from inlay import backbones, tasks
    from inlay.methods.attach import attach

    task = tasks.load(spec)
    backbone = backbones.load(
        spec.model, kind=task.kind, num_labels=task.num_labels, label_names=task.label_names, seed=spec.seed
    )
    set_seed(spec.seed)
    model = attach(backbone.model, spec.method, newly_initialised=backbone.newly_initialised, task_kind=task.kind)
    splits = {
        split: task.encode(split, backbone.processor, spec.max_length, model_config=model.config)
        for split in ("train", "validation", "test")
    }
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=spec.epochs,
        per_device_train_batch_size=spec.batch_size,
        per_device_eval_batch_size=spec.batch_size,
        learning_rate=spec.learning_rate,
        warmup_steps=spec.warmup,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        seed=spec.seed,
        label_names=["labels"],
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=splits["train"],
        eval_dataset=splits["validation"],
        data_collator=task.collator(backbone.processor, model),
        compute_metrics=lambda found: task.compute_metrics(found.predictions, found.label_ids),
    )
    trainer.log = lambda *args, **kwargs: None  # the stock callback prints; printing is not what is compared
    trainer.train()
    found = trainer.predict(splits["test"]).metrics
    model.save_pretrained(folder / "adapter")
    return found


def ours(spec: Any, folder: Path) -> dict[str, float]:
    """The same through `tune`."""
    from inlay.workflow.tune import tune

    return tune(spec, folder, progress=False).metrics["test"]


def timed(work: Callable[[Any, Path], dict[str, float]], spec: Any) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    folder = Path(tempfile.mkdtemp())
    try:
        clock, processor = time.perf_counter(), time.process_time()
        metrics = work(spec, folder)
        taken = time.perf_counter() - clock, time.process_time() - processor
        print(f"{work.__name__:>5}: {taken[0]:.2f} s, {taken[1]:.2f} s of the processor, {metrics}", flush=True)
        return taken
    finally:
        shutil.rmtree(folder)


def compared(taken: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """The ratios, ours to bare."""
    clock, processor = ({name: [row[i] for row in rows] for name, rows in taken.items()} for i in (0, 1))
    return {
        "processor, medians": statistics.median(processor["ours"]) / statistics.median(processor["bare"]),
        "clock, medians": statistics.median(clock["ours"]) / statistics.median(clock["bare"]),
        "clock, fastest": min(clock["ours"]) / min(clock["bare"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded:vit")
    parser.add_argument("--task", default="digits")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()

    from inlay.records import Spec
    from inlay.records.versions import versions

    spec = Spec(model=options.model, method="lora", task=options.task, epochs=options.epochs, learning_rate=1e-3)
    warm = spec.with_(epochs=0.1)
    timed(bare, warm)
    timed(ours, warm)
    taken: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": []}
    load = [os.getloadavg()[0]]
    for _ in range(options.repetitions):
        taken["bare"].append(timed(bare, spec))
        taken["ours"].append(timed(ours, spec))
        load.append(os.getloadavg()[0])
    ratios = compared(taken)
    pairs = [mine[1] / its[1] for mine, its in zip(taken["ours"], taken["bare"], strict=True)]
    result = {
        "what": "tune against a bare Trainer loop, same work",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": options.model,
        "task": options.task,
        "epochs": options.epochs,
        "bound": BOUND,
        "load before, and after each pair": load,
        "ratio": ratios,
        "spread of the processor's ratio over pairs": statistics.stdev(pairs) if len(pairs) > 1 else None,
        "seconds": {name: [{"clock": c, "processor": p} for c, p in rows] for name, rows in taken.items()},
        "versions": versions(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f} (bound {BOUND})")


if __name__ == "__main__":
    main()
