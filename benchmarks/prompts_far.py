"""Activation prompts beside visual prompts on images unlike ImageNet's, with few of them: which layer, which rate?

A small study for a CPU: each set is cut to 400 training and 200 test images, images are read at 64 pixels (17 tokens
in place of 197), and 100 of them are trained on for a few epochs. Every layer and learning rate is run with every seed.
Nothing is selected on test images: what is reported as chosen is chosen on the validation rows, and every cell is in
the results too. `--model` is the folder of a ViT-tiny, `--data` one with the sets as Parquet files.

Runs that are there are found, so the script can be stopped and started again.

    nice -n 19 python benchmarks/prompts_far.py --model vit_tiny_patch16_224/ --data images/
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any

RESULTS = Path(__file__).parent / "results" / "prompts-far-cpu.json"
SETS = ("fashion_mnist", "dtd10")
TRAIN, TEST, SHOTS = 400, 200, 100
COMMON: dict[str, Any] = {"image_size": 64, "shots": SHOTS, "epochs": 8, "batch_size": 8, "evaluations": 1}
LAYERS, RATES, SEEDS = (3, 6, 11), (3e-3, 1e-2, 3e-2), (0, 1, 2)


def subset(source: Path, folder: Path) -> Path:
    """The first training and test rows of a file, whose rows are in a random order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(source).select(["image", "label", "split"])
    splits = table["split"].to_pylist()
    rows = [[i for i, split in enumerate(splits) if split == name] for name in ("train", "test")]
    path = folder / source.name
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.concat_tables([table.take(rows[0][:TRAIN]), table.take(rows[1][:TEST])]), path)
    return path


def cells() -> list[tuple[str, int | None, float]]:
    """Every method, layer and learning rate."""
    found: list[tuple[str, int | None, float]] = [("activation-prompt", layer, r) for layer in LAYERS for r in RATES]
    return [*found, *((method, None, r) for method in ("visual-prompt", "linear-probe") for r in RATES)]


def run_all(model: str, data: Path, out: Path) -> list[dict[str, Any]]:
    """All runs, seed by seed, so that what is stopped early has whole seeds."""
    from inlay import Spec
    from inlay.workflow.tune import tune

    made = []
    for seed in SEEDS:
        for name in SETS:
            file = subset(data / f"{name}.parquet", out / "data")
            for method, layer, rate in cells():
                settings = {} if layer is None else {"layers": [layer]}
                spec = Spec(model=model, data=str(file), label="label", image="image", method=method, seed=seed,
                            learning_rate=rate, settings=settings, **COMMON)  # fmt: skip
                begun = process_time()
                run = tune(spec, out, progress=False)
                metrics = run.metrics
                made.append(
                    {"set": name, "method": method, "layer": layer, "rate": rate, "seed": seed}
                    | {split: metrics[split]["accuracy"] for split in ("validation", "test")}
                )
                print(made[-1], f"{process_time() - begun:.0f} s of processor time", flush=True)
                write(made, run.record["versions"])
    return made


def write(made: list[dict[str, Any]], versions: dict[str, Any]) -> None:
    """The runs, and what they come to, as JSON."""
    names = ("inlay", "python", "torch", "transformers", "peft", "cpu", "cores")
    result = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: versions.get(name) for name in names},
        "protocol": COMMON | {"train_rows": TRAIN, "test_rows": TEST, "model": "vit_tiny_patch16_224"},
        "summary": summary(made),
        "runs": made,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def summary(made: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each set: the test accuracy of every cell, and of the cell of each method that is best on validation rows."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(run["set"] for run in made):
        own = [run for run in made if run["set"] == name]
        whole = [seed for seed in SEEDS if sum(run["seed"] == seed for run in own) == len(cells())]
        grouped = defaultdict(list)
        for run in own:
            if run["seed"] in whole:
                grouped[run["method"], run["layer"], run["rate"]].append(run)
        table = {
            key: (fmean(r["validation"] for r in runs), [r["test"] for r in runs]) for key, runs in grouped.items()
        }
        chosen = {}
        for method in dict.fromkeys(key[0] for key in table):
            best = max((key for key in table if key[0] == method), key=lambda key: table[key][0])
            chosen[method] = {"layer": best[1], "rate": best[2], "test": table[best][1], "mean": fmean(table[best][1])}
        means = [[*key, round(fmean(test), 4)] for key, (_, test) in table.items()]
        found[name] = {"seeds": whole, "chosen_on_validation": chosen, "mean_test_accuracy": means}
    return found


def main() -> None:
    """Run the study and print what it came to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the ViT-tiny")
    parser.add_argument("--data", required=True, type=Path, help="folder with fashion_mnist.parquet and dtd10.parquet")
    parser.add_argument("--out", type=Path, default=Path("runs-prompts-far"), help="folder of runs")
    given = parser.parse_args()
    print(json.dumps(summary(run_all(given.model, given.data, given.out)), indent=1))


if __name__ == "__main__":
    main()
