"""Give a saved task away in a form that other programs read."""

from __future__ import annotations

from pathlib import Path

from inlay.errors import InlayError, unknown
from inlay.records.atomic import write_folder
from inlay.workflow.answer_files import verify_run

FORMS = ("lora",)
METHOD = "multi-lora"


def export(adapter: Path | str, task: str, output: Path | str | None = None, *, to: str = "lora") -> Path:
    """Write one task of an adapter folder as a plain LoRA adapter of PEFT's; the new folder, by default <task>-lora.

    `adapter` is the folder of a run of several tasks, its `adapter` folder, or one that `save` wrote. No model is
    loaded: a task remembers what its shared factor is drawn from.
    """
    if to not in FORMS:
        raise unknown("form to export to", to, FORMS)
    from inlay.methods.multi_lora.exchange import to_lora
    from inlay.methods.saving import read

    folder, target = Path(adapter), Path(f"{task}-{to}" if output is None else output)
    folder = folder / "adapter" if (folder / "adapter").is_dir() else folder
    names = sorted(place.name for place in folder.glob("*") if (place / "adapter_config.json").is_file())
    if names and task not in names:
        raise unknown("task", task, names)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InlayError(f"{target} is there already: give the name of a new folder.")
    verify_run(folder)
    config, tensors = read(METHOD, folder, task)

    def fill(place: Path) -> None:
        to_lora(config, tensors, place)

    write_folder(target, fill)
    return target
