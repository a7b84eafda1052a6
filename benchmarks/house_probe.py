"""What the house backbones learnt: a linear probe on them beside the same probe on random weights.

A logistic regression (C = 0.01, standardised features, at most 200 iterations) on what the model's own classifier would
read. The sets are in the layout that `--data-dir` takes; the house backbones have seen none of them.

    python benchmarks/house_probe.py --data-dir <folder> --write
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoConfig, AutoModelForImageClassification

from inlay import Spec, backbones, tasks
from inlay.anatomy import anatomy
from inlay.records.versions import versions

SETS = ("digits", "fashion-mnist", "caltech101", "flowers102", "oxford-pets", "dtd10", "hymenoptera")
RESULTS = Path(__file__).parent / "results" / "house_probe.json"


@torch.inference_mode()
def read(model: torch.nn.Module, encoded: object, collate: object) -> np.ndarray:
    """What the classifier reads, caught at its door."""
    caught: list[torch.Tensor] = []
    head = anatomy(model).head
    assert head is not None
    hook = head.module.register_forward_pre_hook(lambda module, args: caught.append(args[0].flatten(1)))
    model.eval()
    for start in range(0, len(encoded), 128):  # type: ignore[arg-type]
        batch = collate([encoded[i] for i in range(start, min(start + 128, len(encoded)))])  # type: ignore
        model(pixel_values=batch["pixel_values"])
    hook.remove()
    return torch.cat(caught).numpy()


def probe(name: str, task_name: str, data_dir: str | None) -> dict[str, float | int | str]:
    """Test accuracy of the probe on the pretrained and on the random model, in percent."""
    task = tasks.load(Spec(model=f"embedded:{name}", method="linear-probe", task=task_name, data_dir=data_dir))
    backbone = backbones.load(
        f"embedded:{name}", kind=task.kind, num_labels=task.num_labels, label_names=task.label_names
    )
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(Path(backbones.__file__).parent / "house" / name, num_labels=task.num_labels)
    untrained = AutoModelForImageClassification.from_config(config)
    collate = task.collator(backbone.processor)
    parts = {split: task.encode(split, backbone.processor) for split in ("train", "test")}
    labels = {split: np.asarray(task.split(split)["label"]) for split in parts}
    found = {}
    for which, model in (("pretrained", backbone.model), ("random", untrained)):
        features = {split: read(model, encoded, collate) for split, encoded in parts.items()}
        classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=200))
        classifier.fit(features["train"], labels["train"])
        found[which] = round(100 * classifier.score(features["test"], labels["test"]), 1)
    return {"set": task.name, "model": name, **found, "gain": round(found["pretrained"] - found["random"], 1)}


def main() -> None:
    """Probe both models on every set that can be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=None, help="folder with local copies of the sets; digits needs none")
    parser.add_argument("--write", action="store_true", help=f"record the result in {RESULTS.name}")
    arguments = parser.parse_args()
    rows = []
    for task_name in SETS if arguments.data_dir else SETS[:1]:
        for name in ("vit", "resnet"):
            rows.append(probe(name, task_name, arguments.data_dir))
            print(
                "{model:7} {set:14} pretrained {pretrained:5.1f}  random {random:5.1f}  gain {gain:+.1f}".format(
                    **rows[-1]
                )
            )
    if arguments.write:
        RESULTS.write_text(json.dumps({"rows": rows, "versions": versions()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
