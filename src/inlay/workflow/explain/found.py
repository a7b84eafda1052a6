"""Runs that were made for something else and that an explanation can take as they are."""

from __future__ import annotations

import json
from pathlib import Path

from inlay.records.spec import Spec
from inlay.records.store import Run, Store, load, name
from inlay.workflow.tune import checked, identified


def of_its_own_accord(spec: Spec, out: Path | str) -> Run | None:
    """The finished run in which the method itself chose the very layers that `spec` asks for, if there is one: a
    comparison makes such runs, and what they trained is the same. What was chosen stands in the saved adapter."""
    free = checked(spec.with_(settings={key: value for key, value in spec.settings.items() if key != "layers"}))
    alike = [load(folder) for folder in Path(out).glob(f"{name(free, '')}-*") if (folder / "spec.json").is_file()]
    # Asked first, for it takes no data; which also say how much to train, where nobody else does.
    known = {"epochs": free.epochs, "batch_size": free.batch_size, "pooling": free.pooling}
    if all(run.spec.with_(**known) != free for run in alike):
        return None
    run = Store(out).find(identified(free)[1])
    if run is None or run.status != "finished":
        return None
    run.verify()
    saved = run.adapter / "adapter_config.json"
    found = json.loads(saved.read_text(encoding="utf-8")).get("layers") if saved.is_file() else None
    return run if found == spec.settings["layers"] else None
