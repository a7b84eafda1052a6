"""Fetch a repository of the Hub into a folder: whole, checked, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from inlay.errors import InlayError
from inlay.methods.folder import CONFIG, DEFAULT, NOTE, WEIGHTS, AdapterFolder, check_hash, read_json
from inlay.methods.registry import get
from inlay.records.atomic import write_folder
from inlay.workflow.hub import check_repository, fetch
from inlay.workflow.notes import Say, or_log


def pull(
    repository: str, folder: Path | str | None = None, *, revision: str | None = None, say: Say | None = None
) -> Path:
    """Copy what `repository` (owner/name, or owner/name@revision) holds into a new folder, by default called as it is.

    Only text and safetensors are fetched. Weights that are not those their note was written for are an error, and
    nothing is written then. `say` receives what it holds, and at which commit it was fetched.
    """
    say = or_log(say)
    name, _, at = repository.partition("@")
    if at and revision is not None and at != revision:
        raise InlayError(f"{repository} and revision={revision!r} name two revisions: give one.")
    check_repository(name)
    target = Path(name.rpartition("/")[2] if folder is None else folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InlayError(f"{target} is there already: give the name of a new folder, --out.")
    lines: list[str] = []

    def fill(place: Path) -> None:
        commit = fetch(name, at or revision, place)
        lines.append(f"fetched {name} at {commit[:12]}")
        lines.extend(_check(place, name))

    write_folder(target, fill)
    for line in lines:
        say(line)
    return target


def _check(place: Path, name: str) -> Iterator[str]:
    """What a fetched folder holds; an error where that is not whole."""
    if (place / CONFIG["peft"]).is_file():
        yield _adapter(place)
    elif (place / NOTE["head"]).is_file():
        note = AdapterFolder(place, get(str(read_json(place / NOTE["head"]).get("method")))).read_note()
        check_hash(place / WEIGHTS["head"], note)
        yield f"a head for {note['base_model']}"
    elif (place / CONFIG["full"]).is_file() and any(place.glob("*.safetensors")):
        note = read_json(place / NOTE["full"]) if (place / NOTE["full"]).is_file() else {}
        for path in sorted(place.glob("*.safetensors")):
            check_hash(path, note)
        yield "a checkpoint of Transformers"
    else:
        raise InlayError(
            f"{name} holds neither an adapter ({CONFIG['peft']}) nor a checkpoint with safetensors ({CONFIG['full']}). "
            "Weights in other formats are not fetched."
        )


def _adapter(place: Path) -> str:
    from inlay.methods import vetting
    from inlay.workflow.prompt_folders import method_of

    settings = read_json(place / CONFIG["peft"])
    vetting.check_type(place / CONFIG["peft"], settings)
    noted = read_json(place / NOTE["peft"]) if (place / NOTE["peft"]).is_file() else {}
    method = method_of(place, settings.get("peft_type"), noted.get("method"))
    found = AdapterFolder.find(place, method, DEFAULT)
    vetting.read_tensors(found.weights, found.read_note())
    return f"an adapter of {method.name} for {settings.get('base_model_name_or_path')}"
