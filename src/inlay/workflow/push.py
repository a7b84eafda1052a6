"""Give an adapter or a checkpoint away: its files, with a card that says how it was made, as a repository of the Hub.

Nothing of a card or a note names a path of this machine; what is on the Hub loads where `import inlay` is possible.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from inlay.errors import InlayError
from inlay.methods.card import HUB_ID, About, write_shared_card
from inlay.methods.card_example import PLACE
from inlay.methods.folder import CARD, CONFIG, DEFAULT, AdapterFolder, copy_plain, is_present, preprocessing, read_json
from inlay.records.atomic import write_folder
from inlay.records.command import asked, command
from inlay.records.store import Run, Store
from inlay.records.task_fields import PATHS
from inlay.workflow.adapted import Origin, find_source
from inlay.workflow.hub import PATTERNS, check_repository, publish
from inlay.workflow.notes import Say, or_log
from inlay.workflow.statistics import half_width
from inlay.workflow.tune import select_metrics

SEALS = ("format", "method", "sha256", "digest", "pooling")  # of a note, what is written anew
NORMAL = 1.959963984540054  # of a 95 % interval
SHARES = ("accuracy", "exact-match")  # metrics that are a share of the examples
VERSIONS = ("inlay", "torch", "transformers", "peft", "gpu")


def push(
    adapter: Run | Path | str,
    to: str | None = None,
    *,
    folder: Path | str | None = None,
    task: str | None = None,
    base: str | None = None,
    private: bool = False,
    update: bool = False,
    say: Say | None = None,
) -> str | Path:
    """Put what a run trained, an adapter's folder, or a merged checkpoint into the repository `to` of the Hub.

    With `folder` nothing is pushed: the new folder gets what would be. `base` is the Hub's name of the base model,
    where the adapter was trained on a folder of this machine. A repository that has files already is changed only with
    `update`. Of several tasks `task` names the one. Returns the address of the repository, or the folder.
    """
    say = or_log(say)
    if to is None and folder is None:
        raise InlayError("Give --to owner/name, the repository on the Hub, or --out FOLDER to write it here.")
    for name in filter(None, (to, base)):
        check_repository(name)
    if folder is not None and Path(folder).exists() and any(Path(folder).iterdir()):
        raise InlayError(f"{folder} is there already: give the name of a new folder.")
    source = None if not isinstance(adapter, Run) and _is_checkpoint(Path(adapter)) else find_source(adapter, task)

    def fill(place: Path) -> None:
        if source is None:
            _copy_checkpoint(Path(str(adapter)), place)
            _rename(place / CARD, to)
        else:
            _fill(place, source, to, base, say)

    if folder is not None:
        write_folder(Path(folder), fill)
        return Path(folder)
    assert to is not None
    with TemporaryDirectory(prefix="inlay-push-") as temporary:
        fill(Path(temporary))
        return publish(
            Path(temporary), to, private=private, update=update, message=f"{_title(source)}, written by inlay push"
        )


def _title(source: Origin | None) -> str:
    return "a checkpoint" if source is None else f"{source.method.name} adapter"


# ---- the files


def _is_checkpoint(folder: Path) -> bool:
    """Whether this is a checkpoint of Transformers' without a run around it, such as `inlay merge` writes."""
    return (folder / CONFIG["full"]).is_file() and not (folder / CONFIG["peft"]).exists() and not _is_run(folder)


def _is_run(folder: Path) -> bool:
    return any((each / "spec.json").is_file() for each in (folder, folder.resolve().parent))


def _copy_checkpoint(folder: Path, place: Path) -> None:
    names = sorted(path.name for pattern in PATTERNS for path in folder.glob(pattern) if not path.name.startswith("."))
    if not any(name.endswith(".safetensors") for name in names):
        raise InlayError(f"{folder} holds no weights as safetensors: nothing else is pushed. Save it as such.")
    copy_plain(folder, names, place)


def _rename(card: Path, to: str | None) -> None:
    if to is not None and card.is_file():
        card.write_text(card.read_text(encoding="utf-8").replace(PLACE, to), encoding="utf-8")


def _fill(place: Path, source: Origin, to: str | None, base: str | None, say: Say) -> None:
    """Copy what was trained, with the Hub's name of its base, and write its note and card anew."""
    found = AdapterFolder.find(source.folder, source.method, source.task or DEFAULT)
    note = found.read_note()
    if source.method.form == "full":
        _copy_checkpoint(found.place, place)
    else:
        names = [found.weights.name, *([found.config.name] if found.config is not None else []), *preprocessing(note)]
        copy_plain(found.place, names, place)
    about = About.from_json(note["about"]) if isinstance(note.get("about"), Mapping) else None
    address = _address(source, place, about, base)
    if (place / CONFIG["peft"]).is_file():
        settings = read_json(place / CONFIG["peft"]) | {"base_model_name_or_path": address}
        (place / CONFIG["peft"]).write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
    if about is None:
        copy_plain(found.place, [CARD], place)
        _rename(place / CARD, to)
        say("the adapter has no note of inlay's: its card is the one beside it, and says nothing of its training")
        return
    if address != about.address:
        about = replace(about, base=address, address=address)
    kept = {name: value for name, value in note.items() if name not in SEALS}
    kept |= {"base_model": about.base, "about": about.to_json()}
    AdapterFolder(place, source.method).write_note(kept, note.get("pooling"))
    beside = replace(about, preprocessing=bool(preprocessing(note)) or source.method.form == "full")
    sections = [] if source.run is None else [*_sections(source.run, source.task, about)]
    write_shared_card(place, source.method, beside, to or PLACE, sections)


def _address(source: Origin, place: Path, about: About | None, base: str | None) -> str:
    """The base model as others can load it."""
    if source.method.form == "full":
        return base or (about.address if about is not None else "")
    settings = read_json(place / CONFIG["peft"]) if is_present(place / CONFIG["peft"]) else {}
    known = about.address if about is not None else str(settings.get("base_model_name_or_path") or "")
    if base is not None:
        return base
    if HUB_ID.fullmatch(known) is None:
        raise InlayError(
            f"The base model of this adapter is {known or 'not known'!r}, a folder of the machine it was trained on: "
            "nobody else could load it. Say where the Hub has the same model, --base owner/name, or push a whole "
            "model: `inlay merge`, then `inlay push --adapter` with the folder that it wrote."
        )
    return known


# ---- the card


def _sections(run: Run, task: str | None, about: About) -> Iterator[str]:
    """How well it does and how it was made, as far as the record of its run says."""
    record, spec = run.record, run.spec
    name = task or ""
    known = (record.get("tasks") or {}).get(name) or record["task"]
    test = select_metrics(spec, record["metrics"].get("test", {}), name)
    count = (known.get("examples") or record.get("examples") or {}).get("test", 0)
    if test:
        yield "## Results\n\n" + _results(test, count, _other_seeds(run), name)
    portrait = record["portrait"]
    memory, parameters = portrait.get("peak_memory") or {}, portrait["parameters"]
    rows = {
        "data": f"{_data(run, name)} (SHA-256 of the rows {str(known['digest'])[:12]})",
        "parameters": f"{parameters['trained']:,} trained of {parameters['total']:,}",
        "saved": f"{portrait['saved_bytes']:,} bytes",
        "peak memory": f"{memory['bytes'] / 2**20:,.0f} MiB ({memory.get('how', '')})" if memory.get("bytes") else "",
        "time": f"{record['seconds']:.0f} s in all, {record['steps']} updates, on {portrait['device']}",
        "versions": ", ".join(f"{key} {record['versions'][key]}" for key in VERSIONS if record["versions"].get(key)),
    }
    listed = "\n".join(f"- {title}: {' '.join(text.split())}" for title, text in rows.items() if text)
    yield f"## How it was made\n\n{listed}\n\n```sh\n{_command(run, about)}\n```"


def _results(test: Mapping[str, float], count: int, others: Sequence[Run], task: str) -> str:
    lines = [f"| metric (test, {count:,} examples) | value | 95 % interval |", "| --- | --- | --- |"]
    for name, value in test.items():
        interval = "-"
        seeds = [select_metrics(run.spec, run.record["metrics"].get("test", {}), task).get(name) for run in others]
        if len(others) > 1 and all(each is not None and math.isfinite(each) for each in seeds):
            values = [float(each) for each in seeds if each is not None]
            width = half_width(values) or 0.0
            mean = sum(values) / len(values)
            interval = f"{mean - width:.4g} to {mean + width:.4g} (mean {mean:.4g} of {len(values)} seeds, t)"
        elif name in SHARES and count:
            low, high = wilson(value, count)
            interval = f"{low:.4g} to {high:.4g} (one seed; Wilson, over the examples)"
        lines.append(f"| {name} | {value:.4g} | {interval} |")
    return "\n".join(lines)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of so many examples."""
    square = NORMAL**2 / count
    middle = (share + square / 2) / (1 + square)
    width = NORMAL / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, middle - width), min(1.0, middle + width)


def _other_seeds(run: Run) -> list[Run]:
    """The finished runs beside a run, itself among them, that differ from it in their seed alone."""
    plain = run.spec.with_(seed=0)
    found = []
    for each in Store(run.folder.parent).list():
        with contextlib.suppress(InlayError):  # a damaged run counts for nothing
            if each.status == "finished" and each.spec.with_(seed=0) == plain and each.record["metrics"]:
                found.append(each)
    return found


def _data(run: Run, task: str) -> str:
    own = run.spec.task_fields.get(task, {})
    path = own.get("data") or run.spec.data
    return Path(path).name if path else str(own.get("task") or task or run.spec.subject)


def _command(run: Run, about: About) -> str:
    """The command of the run, with names in place of paths of this machine."""
    spec = asked(run)
    changes: dict[str, Any] = {name: _plain(getattr(spec, name)) for name in PATHS if getattr(spec, name)}
    fields = {
        task: {key: _plain(value) if key in PATHS else value for key, value in own.items()}
        for task, own in spec.task_fields.items()
    }
    changes |= {"task_fields": fields} if fields else {}
    return command(spec.with_(model=about.base, **changes))


def _plain(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]
