"""What is odd about a model's weights is said by the first run of it in a folder, not by every one."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from inlay import Spec, tune


def test_dead_dimensions_are_told_once_and_kept_on_record(review_spec: Spec, text_model: Path, tmp_path: Path) -> None:
    weights = load_file(text_model / "model.safetensors")
    last = max(name for name in weights if name.endswith("output.LayerNorm.weight"))
    weights[last][3] = 0
    save_file(weights, text_model / "model.safetensors", {"format": "pt"})
    said: list[str] = []
    runs = [
        tune(review_spec.with_(method=method), tmp_path / out, progress=False, say=said.append)
        for out, method in (("runs", "bias"), ("runs", "norm"), ("others", "norm"))
    ]
    assert sum("dead dimensions" in line for line in said) == 2  # once in each folder
    assert all(any("dead dimensions" in note for note in run.record["backbone"]["notes"]) for run in runs)
    (tmp_path / "runs" / runs[0].id / "record.json").write_text('{"backbone": null}')
    tune(review_spec.with_(method="norm", seed=1), tmp_path / "runs", progress=False, say=said.append)
    assert sum("dead dimensions" in line for line in said) == 2  # a damaged record does not stop a run
