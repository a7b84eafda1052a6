"""A base model with an adapter in it, from whatever a user can point at: a run, a folder of tasks, a PEFT adapter.

What a run and a folder of tasks do not leave open is said here of a bare adapter by its files: which base model, which
kind of task, and what its outputs are called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from inlay.errors import InlayError, misspelt, unknown
from inlay.methods import registry
from inlay.methods.card import About
from inlay.methods.folder import CONFIG, DEFAULT, NOTE, TASKS, WEIGHTS, AdapterFolder, is_present, read_json
from inlay.methods.protocol import Method
from inlay.records.store import Run
from inlay.tasks import kinds
from inlay.workflow.answer_files import find_run_of, locate_base, read_facts
from inlay.workflow.predict import LoadOptions
from inlay.workflow.tune import DEFAULT_OUT

if TYPE_CHECKING:
    from inlay.tasks import TaskSchema

EXAMPLES = ("the first of two short texts", "and the other one, which is a little longer")
KIND_OF = {
    "SEQ_CLS": kinds.CLASSIFICATION,
    "TOKEN_CLS": kinds.TOKENS,
    "CAUSAL_LM": kinds.CAUSAL_LM,
    "SEQ_2_SEQ_LM": kinds.SEQUENCE_TO_SEQUENCE,
    "QUESTION_ANS": kinds.QUESTION_ANSWERING,
}


@dataclass(frozen=True)
class Adapted:
    """A model with one adapter in it, ready to run; `schema` is that of its task, where it is known, and `about` what
    its card says."""

    model: Any
    processor: Any
    method: Method
    kind: str
    about: About | None
    schema: TaskSchema | None = None

    @property
    def modality(self) -> str:
        """Whether it reads text or images."""
        return kinds.modality(self.kind)


@dataclass(frozen=True)
class Origin:
    """What a user pointed at, of which no model has been loaded yet."""

    method: Method
    folder: Path
    run: Run | None = None
    task: str | None = None


def find_source(place: Run | Path | str, task: str | None = None, out: Path | str = DEFAULT_OUT) -> Origin:
    """A run (by itself, its folder or its name), the folder of its adapter, a folder of tasks, or a PEFT adapter."""
    from inlay.workflow.loaded import find_run

    if isinstance(place, Run):
        return _of_run(place, task)
    folder = Path(place)
    if not folder.is_dir():
        return _of_run(find_run(place, out), task)
    if (run := find_run_of(folder)) is not None:
        return _of_run(run, task)
    folder = folder / "adapter" if (folder / "adapter").is_dir() else folder
    if (folder / TASKS).is_file():
        facts = read_facts(folder)
        return Origin(registry.get(facts["method"]), folder, task=_choose(task, facts["tasks"], str(folder)))
    if not is_present(folder / CONFIG["peft"]):
        raise InlayError(
            f"{folder} is no run and holds no adapter: it has no {CONFIG['peft']}.{misspelt(folder)} Give a run's "
            "folder (`inlay runs list` shows them), or that of an adapter in PEFT's format."
        )
    return Origin(_read(folder)[0], folder)


def _of_run(run: Run, task: str | None) -> Origin:
    run.verify()
    tasks = run.record.get("tasks") or {run.record["task"]["schema"]["name"]: None}
    return Origin(registry.get(run.spec.method), run.adapter, run, _choose(task, tasks, f"The run {run.id}"))


def _choose(task: str | None, known: Any, what: str) -> str:
    if task is None and len(known) > 1:
        raise InlayError(f"{what} has several tasks: choose one with --task (task=), of {', '.join(known)}.")
    if task is not None and task not in known:
        raise unknown("task", task, known)
    return task or str(next(iter(known)))


def load_adapted(source: Origin, held: str | None = None, **how: Unpack[LoadOptions]) -> Adapted:
    """The model of a source, in full precision even where it was trained on fewer bits.

    `model` names its base where that has moved since; for the rest see `inlay.load`. `held` is the name of a type in
    which the weights may stay: see `inlay.backbones.load`.
    """
    if source.run is not None:
        return _load_run(source, source.run, held, **how)
    if source.task is not None:
        return _load_task(source, source.task, held, **how)
    return _load_bare(source, held, **how)


def _load_run(source: Origin, run: Run, held: str | None, **how: Unpack[LoadOptions]) -> Adapted:
    from inlay.methods.saving import about
    from inlay.workflow.loaded import open_run
    from inlay.workflow.predict import check_trust, restore_adapters

    loaded = open_run(run, task=source.task, **how)
    name = loaded.task if run.spec.tasks else DEFAULT
    if run.spec.quantize is None and held is None:
        model, processor = loaded.model, loaded.processor
    else:
        trust = how.get("trust_remote_code", False)
        check_trust(run.spec.trust_remote_code, trust, f"The run {run.id}")
        spec = run.spec.with_(quantize=None, model=how.get("model") or run.spec.model, trust_remote_code=trust)
        model, backbone = restore_adapters(spec, loaded.schema, run.adapter, [name], held=_type(held))
        processor = backbone.processor
    return Adapted(
        model=model,
        processor=processor,
        method=source.method,
        kind=loaded.schema.kind,
        about=about(source.method, run.adapter, name),
        schema=loaded.schema,
    )


def _type(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, name)


def _load_task(source: Origin, task: str, held: str | None, **how: Unpack[LoadOptions]) -> Adapted:
    from inlay.methods.saving import about
    from inlay.tasks import TaskSchema
    from inlay.workflow.answer import settings_of
    from inlay.workflow.predict import check_trust, restore_adapters

    facts = read_facts(source.folder)
    trust = how.get("trust_remote_code", False)
    check_trust(facts["trust_remote_code"], trust, str(source.folder))
    schema = TaskSchema.from_json(facts["tasks"][task])
    base = how.get("model") or locate_base(source.folder, facts)
    spec = settings_of(facts, task).with_(model=base, trust_remote_code=trust)
    model, backbone = restore_adapters(spec, schema, source.folder, [task], held=_type(held))
    known = about(source.method, source.folder, task)
    return Adapted(model, backbone.processor, source.method, schema.kind, known, schema)


def make_example(adapted: Adapted, texts: Sequence[str] = EXAMPLES) -> dict[str, Any]:
    """A small batch that the model reads, to see that what is made of it computes the same: these texts, or as many
    images of noise."""
    processor: Any = adapted.processor
    if adapted.modality == "image":
        import numpy as np
        from PIL import Image

        from inlay.backbones.processors import image_side

        side = image_side(processor)
        pixels = np.random.default_rng(0).integers(0, 256, (len(texts), side, side, 3), dtype=np.uint8)
        batch = dict(processor(images=[Image.fromarray(each) for each in pixels], return_tensors="pt"))
        if kinds.get(adapted.kind).pairs_images:
            batch |= dict(processor.tokenizer.pad(processor.read_texts(texts)[0], return_tensors="pt"))
        return batch
    batch = dict(processor(list(texts), padding=True, truncation=True, return_tensors="pt"))
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    config = adapted.model.config
    if getattr(config, "is_encoder_decoder", False):
        if kinds.get(adapted.kind).predicts == "text":
            batch["decoder_input_ids"] = batch["input_ids"][:, :1]
        elif config.eos_token_id is not None:  # whose state such a classifier reads
            batch["input_ids"][:, 0] = config.eos_token_id
    return batch


# ---- an adapter that is neither in a run nor among tasks


def _read(folder: Path) -> tuple[Method, dict[str, Any], dict[str, Any]]:
    """What the files of an adapter say: its method, its settings and its note."""
    from inlay.methods import vetting
    from inlay.workflow.prompt_folders import method_of

    path = folder / CONFIG["peft"]
    settings = read_json(path)
    vetting.check_type(path, settings)
    note = read_json(folder / NOTE["peft"]) if is_present(folder / NOTE["peft"]) else {}
    method = method_of(folder, settings.get("peft_type"), note.get("method"))
    return method, settings, AdapterFolder.find(folder, method, DEFAULT).read_note()


def _load_bare(source: Origin, held: str | None, **how: Unpack[LoadOptions]) -> Adapted:
    from inlay import backbones
    from inlay.backbones import locate
    from inlay.methods import attach
    from inlay.workflow.prompt_folders import PromptAdapter, find_base

    method, settings, note = _read(source.folder)
    known = About.from_json(note["about"]) if "about" in note else None
    place = PromptAdapter(source.folder, method, settings, note, {})
    base = how.get("model") or find_base(place)
    revision = None if how.get("model") else settings.get("revision")
    kind = known.kind if known is not None and known.kind is not None else None
    if kind is None:
        kind = KIND_OF.get(str(settings.get("task_type"))) or _guess_kind(source.folder, base, revision)
    given: dict[str, Any] = {
        "kind": kind,
        "revision": revision,
        "trust_remote_code": how.get("trust_remote_code", False),
        "pooling": note.get("pooling") or "own",
        "image_size": None if known is None else known.image_size,
        "held": _type(held),
    }
    labels = _labels(kind, known, locate.find(base, revision).config)
    backbone = backbones.load(base, label_names=labels, **given)
    outputs = _outputs(backbone.model, source.folder) if labels is not None else None
    if labels is not None and outputs not in (None, len(labels)):
        labels = [f"LABEL_{i}" for i in range(outputs or 0)]  # of a head that says no more
        backbone = backbones.load(base, label_names=labels, **given)
    model = attach.restore(backbone.model, method, source.folder, fingerprint=backbone.fingerprint)
    return Adapted(model, backbone.processor, method, kind, known)


def _guess_kind(folder: Path, base: str, revision: str | None) -> str:
    from inlay.backbones import locate

    if locate.modality(base, revision) == "image":
        return kinds.IMAGES
    raise InlayError(
        f"{folder / CONFIG['peft']} has no task_type, which says what the adapter is for: one of "
        f"{', '.join(KIND_OF)}. Write it there, or give the run that trained the adapter."
    )


def _labels(kind: str, known: About | None, config: Mapping[str, Any]) -> list[str] | None:
    """What the outputs are called: as the adapter's note says, else as the base model's config does."""
    if kinds.get(kind).predicts in ("text", "masked"):
        return None
    if kinds.get(kind).predicts == "value":
        return ["value"]
    if known is not None and known.labels:
        return list(known.labels)
    named = config.get("id2label") or {str(i): f"LABEL_{i}" for i in range(int(config.get("num_labels") or 2))}
    return [str(named[key]) for key in sorted(named, key=int)]


def _outputs(model: Any, folder: Path) -> int | None:
    """How many outputs the head has that lies with an adapter; None where it has none."""
    from inlay.methods.mixture.heads import outputs_in
    from inlay.methods.plain import WRAPPED
    from inlay.methods.vetting import read_shapes

    shapes = read_shapes(folder / WEIGHTS["peft"])
    return outputs_in(model, {name.removeprefix(WRAPPED): shape for name, shape in shapes.items()})
