"""The card beside a saved adapter: what it was trained on and for, how well it does, and how to load it.

An adapter is made to be given away, so nothing of it names a path of the machine it was made on. The facts are kept in
its note too (saving.py): what is made of an adapter later, as `inlay export` does, has a card without its run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from inlay.backbones.embedded import PREFIX as EMBEDDED
from inlay.backbones.locate import portable
from inlay.backbones.pooled import installed
from inlay.methods.card_example import PLACE, write_example
from inlay.methods.folder import CARD, CONFIG, DEFAULT, read_json
from inlay.methods.registry import Method
from inlay.tasks import kinds

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
AUTO = {  # PEFT's classes that load the base model too, by the type of task
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "CAUSAL_LM": "ForCausalLM",
    "SEQ_2_SEQ_LM": "ForSeq2SeqLM",
    "QUESTION_ANS": "ForQuestionAnswering",
}
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class About:
    """What is known of an adapter. `base` is what inlay finds its base model by, `address` what Transformers does;
    `source` is where an embedded one came from. `pooling` is what the head reads, `replaced` whether that is not what
    its architecture has it read. `facts` are further lines of the card, by their titles.
    `schema` is what the task reads and answers, `preprocessing` whether its tokenizer or image processor is
    beside, `image_size` the side of its images where that is not the base model's own."""

    base: str
    address: str
    model_class: str
    source: str | None = None
    licence: str | None = None
    pooling: str | None = None
    replaced: bool = False
    task: str | None = None
    kind: str | None = None
    labels: tuple[str, ...] | None = None
    seed: int | None = None
    examples: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    preprocessing: bool = False
    image_size: int | None = None
    folder: Path | None = field(default=None, compare=False)  # of the base model, on this machine: never written down

    @classmethod
    def of(
        cls,
        backbone: Any,
        task: Any = None,
        seed: int | None = None,
        metrics: Mapping[str, Mapping[str, float]] | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> About:
        """Of what a loaded backbone was adapted to."""
        base = portable(backbone.name)
        folder = Path(backbone.name).expanduser()
        return cls(
            base=base,
            address=backbone.address,
            model_class=type(backbone.model).__name__,
            source=backbone.source if base.startswith(EMBEDDED) else None,
            licence=getattr(backbone, "licence", None),
            pooling=getattr(backbone, "pooling", None),
            image_size=getattr(backbone, "image_size", None),
            replaced=installed(backbone.model) is not None,
            task=getattr(task, "name", None),
            kind=getattr(task, "kind", None),
            labels=getattr(task, "output_names", getattr(task, "label_names", None)),
            seed=seed,
            examples={split: len(getattr(task, split)) for split in SPLITS if hasattr(task, split)},
            metrics={split: _finite(found) for split, found in (metrics or {}).items()},
            facts=dict(facts or {}),
            schema=None if getattr(task, "schema", None) is None else task.schema.to_json(),
            folder=folder if base.startswith(".") and folder.is_dir() else None,
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data, without what is not known."""
        known = {name: value for name, value in asdict(self).items() if value not in (None, {})}
        return {name: value for name, value in known.items() if name != "folder"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> About:
        """From what `to_json` made."""
        labels = data.get("labels")
        return cls(**{**data, "labels": tuple(labels) if labels is not None else None})


def write_card(folder: Path, method: Method, abouts: Mapping[str, About]) -> None:
    """Write the card of a folder: of one adapter, called `default`, or of several in folders of their names."""
    (folder / CARD).write_text(card(method, abouts), encoding="utf-8")


def write_merged_card(folder: Path, method: Method, about: About, model_class: str, notes: Sequence[str]) -> None:
    """Write the card of a checkpoint that an adapter was merged into; `notes` are what its reader must do besides."""
    merged = f"# {about.base} with {method.name} merged in" + (f" for {about.task}" if about.task else "")
    sees = about.kind is not None and kinds.modality(about.kind) == "image"
    processor = "AutoImageProcessor" if sees else "AutoTokenizer"
    code = _code(
        [f"from transformers import {processor}, {model_class}"],
        [
            f'processor = {processor}.from_pretrained("{PLACE}")',
            f'model = {model_class}.from_pretrained("{PLACE}").eval()',
        ],
    )
    loading = f"## How to load this model\n\nA checkpoint of Transformers, complete as it is.\n\n{code}"
    heed = ["## What it reads and gives\n\n" + "\n".join(f"- {note}" for note in notes)] if notes else []
    front = _front(replace(method, form="full"), about)
    text = "\n\n".join([front, merged, _facts(method, about, {DEFAULT: about}), *heed, loading]) + "\n"
    (folder / CARD).write_text(text, encoding="utf-8")


def write_shared_card(folder: Path, method: Method, about: About, place: str, sections: Sequence[str]) -> None:
    """Write the card of one adapter that is given away, with further sections; `place` is the repository of the hub
    that it is loaded from."""
    title = f"# {method.name} for {about.base}" + (f" on {about.task}" if about.task else "")
    alone = "" if about.image_size else _by_itself(folder, place)
    loading = f"## How to load it\n\n{alone}{_loading(method, DEFAULT, about, place)}"
    parts = [_front(method, about), title, _facts(method, about, {DEFAULT: about}), *sections, loading]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _by_itself(folder: Path, place: str) -> str:
    """The lines with which PEFT loads an adapter and its base model at once; nothing for what is no adapter."""
    path = folder / CONFIG["peft"]
    if not path.is_file():
        return ""
    kind = read_json(path).get("task_type")
    name = f"AutoPeftModel{AUTO.get(str(kind), '')}"
    code = _code(
        ["import inlay  # registers the method and sizes the head", f"from peft import {name}"],
        [f'model = {name}.from_pretrained("{place}").eval()'],
    )
    return f"With `pip install inlay`, in one line:\n\n{code}\n\nStep by step, and asked something:\n\n"


def card(method: Method, abouts: Mapping[str, About]) -> str:
    """The card's text."""
    first = next(iter(abouts.values()))
    on = ", ".join(about.task for about in abouts.values() if about.task)
    title = f"# {method.name} for {first.base}" + (f" on {on}" if on else "")
    shown = [_facts(method, first, abouts), _results(abouts)] if len(abouts) > 1 else [_facts(method, first, abouts)]
    loading = f"## How to load this adapter\n\n{_loading(method, *next(iter(abouts.items())))}"
    return "\n\n".join([_front(method, first), title, *shown, loading]) + "\n"


def _front(method: Method, about: About) -> str:
    """The block that the hub reads; a base that it does not have is left out, since it would refuse the card."""
    lines = [f"library_name: {'peft' if method.form == 'peft' else 'transformers'}"]
    if HUB_ID.fullmatch(about.address):
        lines.append(f"base_model: {json.dumps(about.address)}")
    if about.licence:
        lines.append(f"license: {about.licence.lower()}")
    return "\n".join(["---", *lines, "tags:", "- inlay", f"- {method.name}", "---"])


def _facts(method: Method, about: About, abouts: Mapping[str, About]) -> str:
    known = about.address if about.base == about.address else f"{about.address}, which is `{about.base}` in inlay"
    rows = {
        "base model": known + (f" ({about.source})" if about.source else ""),
        "licence of the base model": about.licence or "as its owner says",
        "method": f"{method.name}: {method.summary}",
        "paper": method.paper,
        "images": f"{about.image_size} x {about.image_size} pixels" if about.image_size else None,
        "a text's vector" if about.kind == kinds.EMBEDDING else "the head reads": about.pooling,
    }
    if len(abouts) == 1 and about.task:
        rows |= {
            "task": f"{about.task} ({about.kind})",
            "labels": ", ".join(about.labels or ()),
            "examples": ", ".join(f"{count:,} {split}" for split, count in about.examples.items() if count),
            "result": _result(about),
        }
    return _table(["", ""], [[title, text] for title, text in {**rows, **about.facts}.items() if text])


def _results(abouts: Mapping[str, About]) -> str:
    """A line for each of several adapters."""
    rows = [[name, f"{a.task} ({a.kind})", ", ".join(a.labels or ()), _result(a)] for name, a in abouts.items()]
    return _table(["adapter", "task", "labels", "result"], rows)


def _result(about: About) -> str:
    """The metrics on the test set, else on validation: on how many examples, and with which seed."""
    if not about.metrics:
        return ""
    split = "test" if "test" in about.metrics else next(iter(about.metrics))
    found = about.metrics[split].items()
    values = ", ".join(f"{name} {'not finite' if value is None else format(value, '.4g')}" for name, value in found)
    on = f"{about.examples[split]:,} {split} examples" if split in about.examples else split
    return f"{values} on {on}, seed {about.seed}"


def _loading(method: Method, name: str, about: About, where: str = PLACE) -> str:
    place = where if name == DEFAULT else f"{where}/{name}"
    imports, lines = _base(about) if method.form != "full" else ([f"from transformers import {about.model_class}"], [])
    if method.form == "full" and about.replaced:  # what the head reads is said in files that inlay heeds
        imports, lines = ["import inlay"], [*_load_backbone(place, about)[:1], "model = backbone.model.eval()"]
    elif method.form == "full":
        lines = [f'model = {about.model_class}.from_pretrained("{place}").eval()']
    elif method.form == "head":
        imports.append("from inlay.methods.attach import restore")
        found = json.dumps(place)
        if where != PLACE:
            imports.append("from huggingface_hub import snapshot_download")
            found = f"snapshot_download({found})"
        lines.append(f'model = restore(base, "{method.name}", {found})')
    else:
        imports.append("from peft import PeftModel")
        if method.tuner is not None or about.replaced:
            reads = "gives vectors" if about.kind == kinds.EMBEDDING else f"lets the head read {about.pooling}"
            what = "registers the method with PEFT" if method.tuner is not None else reads
            imports = [f"import inlay  # {what}", *(line for line in imports if line != "import inlay")]
        lines.append(f'model = PeftModel.from_pretrained(base, "{place}").eval()')
    if about.schema is not None:
        from_backbone = about.base.startswith(EMBEDDED) and not about.preprocessing
        more, example = write_example(
            about.schema,
            place if about.preprocessing else about.address,
            "backbone.processor" if from_backbone else None,
        )
        imports, lines = [*imports, *more], [*lines, "", *example]
    code = _code(_merged(imports), lines)
    if about.base != about.address and method.form == "peft":
        code += f"\n\nTransformers knows the base as `{about.address}`. inlay's `{about.base}` is what was trained on."
    return code


def _base(about: About) -> tuple[list[str], list[str]]:
    """What to import to load the base model, and the lines that do."""
    captioned = about.kind is not None and kinds.get(about.kind).has_captions  # whose classes are texts, and no head
    labels = list(about.labels) if about.labels and not captioned else None
    value = about.kind == kinds.REGRESSION
    if about.base.startswith(EMBEDDED):
        return ["import inlay"], _load_backbone(about.base, about)
    if about.image_size is not None:  # its positions are interpolated by inlay
        return ["import inlay"], _load_backbone(about.address, about)
    address = json.dumps(about.address)
    lines, sized = [], ""
    if labels is not None:
        lines = [f"labels = {json.dumps(labels, ensure_ascii=False)}"]
        numbered = "id2label=dict(enumerate(labels)), label2id={name: i for i, name in enumerate(labels)}"
        sized = f", {numbered}, ignore_mismatched_sizes=True"
    elif value:
        sized = ", num_labels=1, ignore_mismatched_sizes=True"
    lines.append(f"base = {about.model_class}.from_pretrained({address}{sized})")
    return [f"from transformers import {about.model_class}"], lines


def _load_backbone(name: str, about: About) -> list[str]:
    """The lines that load a model by inlay, with a head that reads what it did in training."""
    labels = list(about.labels) if about.labels else None
    given = {
        "kind": about.kind or kinds.CAUSAL_LM,
        "num_labels": 1 if about.kind == kinds.REGRESSION and labels is None else None,
        "label_names": labels,
        "pooling": about.pooling,
        "image_size": about.image_size,
    }
    told = "".join(f", {key}={json.dumps(each, ensure_ascii=False)}" for key, each in given.items() if each is not None)
    return [f'backbone = inlay.load_backbone("{name}"{told})', "base = backbone.model"]


def _merged(imports: Sequence[str]) -> list[str]:
    """Import lines, each once, inlay's own first; those from one module in one line."""
    names: dict[str, list[str]] = {}
    plain = []
    for line in dict.fromkeys(imports):
        module, _, name = line.partition(" import ")
        if line.startswith("from "):
            names.setdefault(module, []).append(name)
        else:
            plain.append(line)
    plain.sort(key=lambda line: not line.startswith("import inlay"))
    return [*plain, *(f"{module} import {', '.join(sorted(each))}" for module, each in sorted(names.items()))]


def _code(imports: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join(["```python", *imports, "", *lines, "```"])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _finite(found: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
