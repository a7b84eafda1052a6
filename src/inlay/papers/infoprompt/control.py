"""A control for the decoder's tables of docs/infoprompt-measured.md: what its states know without any prompt.

Logistic regression on the last state of the frozen SmolLM2, read where the tables' methods read it: at the end of the
bare text, as adapters, LoRA and full training have it, and at the end of the text with its cue, as the methods with
prompts do, but without prompts. The same 64 training examples, seeds and test rows; C is chosen by five-fold
cross-validation on those 64 (three-fold where a class has fewer).

    python -m inlay.papers.infoprompt.control run --data-dir <folder> [--model embedded:smollm2]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from inlay.papers.infoprompt.table import (
    GROUPS,
    MOST_LENGTH,
    SCORED_BATCH,
    TASKS,
    TEST_ROWS,
    rows,
    some,
)
from inlay.papers.reproduce import kept

CONTROL = kept.path("infoprompt", "control.json")
SEEDS = tuple(range(5))
GROUP = "smollm2-64"
SHOTS = GROUPS[GROUP].shots
CS = np.logspace(-4, 1, 6)  # of features that have mean 0 and deviation 1


def readings(schema: Any) -> dict[str, Any]:
    """The task's schema with the bare text, and with its cue and no prompts."""
    from inlay.tasks.prompts import left_to_right

    with_cue = left_to_right(schema.prompt_template, schema.cue).removeprefix("{soft_prompt} ")
    return {"bare text": schema, "text and cue": dataclasses.replace(schema, template=with_cue)}


@torch.no_grad()
def states(backbone: Any, schema: Any, data: Any) -> np.ndarray:
    """The last token's last state of each row."""
    encoded = schema.encode_inputs(data.to_list(), backbone.processor, MOST_LENGTH)
    collate, body = schema.collator(backbone.processor), backbone.model.base_model
    found = []
    for start in range(0, len(encoded), SCORED_BATCH):
        batch = collate([encoded[i] for i in range(start, min(start + SCORED_BATCH, len(encoded)))])
        seen = body(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)[0]
        found.append(seen[torch.arange(len(seen)), batch["attention_mask"].sum(1) - 1])
    return torch.cat(found).float().numpy()


def fitted(features: np.ndarray, labels: np.ndarray) -> Any:
    """Logistic regression, its C by cross-validation on the same rows."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    folds = StratifiedKFold(5 if np.bincount(labels).min() >= 5 else 3, shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SemEval's classes some have three examples
        return make_pipeline(StandardScaler(), LogisticRegressionCV(Cs=CS, cv=folds, max_iter=2000)).fit(
            features, labels
        )


def run(args: argparse.Namespace) -> None:
    from inlay import backbones
    from inlay.records.versions import versions

    found: dict[str, Any] = {"versions": versions(), "model": args.model, "shots": SHOTS, "seeds": SEEDS, "tasks": {}}
    for name in TASKS:
        drawn = [rows(name, args.data_dir, SHOTS, seed) for seed in SEEDS]
        task = drawn[0]
        test = some(task.test, TEST_ROWS)
        backbone = backbones.load(
            args.model, kind=task.kind, num_labels=task.num_labels, label_names=task.label_names, seed=0
        )
        backbone.model.eval()
        for reading, schema in readings(task.schema).items():
            seen, truth = states(backbone, schema, test), np.asarray(test["label"])
            scores = []
            for one in drawn:
                model = fitted(states(backbone, schema, one.train), np.asarray(one.train["label"]))
                logits = model.decision_function(seen)
                logits = np.stack([-logits, logits], axis=1) if logits.ndim == 1 else logits
                scores.append(100 * task.schema.compute_metrics(logits, truth)[task.metrics[0]])
            found["tasks"].setdefault(name, {})[reading] = [round(each, 2) for each in scores]
            print(f"{name:<14} {reading:<13} {fmean(scores):.1f}", flush=True)
            Path(args.results).write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    doing = commands.add_parser("run", help="fit the regressions")
    doing.add_argument("--data-dir", required=True)
    doing.add_argument("--model", default="embedded:smollm2")
    doing.add_argument("--results", default=str(CONTROL))
    doing.set_defaults(do=run)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
