"""Load a backbone for a task: the pretrained weights, a new head, the processor, and an account of what was found.

Transformers' Auto classes do the work, from safetensors only. Around them: one clear error in place of a silently
incomplete model, a head drawn from the run's seed, quiet logs, and memory that never holds much more than the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from inlay.backbones import (
    answer_outputs,
    embedded,
    image_sizes,
    locate,
    losses,
    new_parts,
    pooled,
    processors,
    quantised,
    towers,
)
from inlay.backbones import pooling as poolings
from inlay.backbones.devices import pick_device, pick_dtype
from inlay.backbones.locate import Location, heads
from inlay.backbones.new_parts import fingerprint
from inlay.backbones.pooling import AUTO
from inlay.console import quiet
from inlay.errors import InlayError, first_line
from inlay.tasks import kinds
from inlay.tasks.schema import SPAN_OUTPUTS

if TYPE_CHECKING:
    from inlay.records.spec import Spec
    from inlay.tasks import Task, TaskSchema


ROOM = 1.5  # times a model's size, for the model and what is done with it


@dataclass
class Backbone:
    """A loaded model and what belongs to it.

    `newly_initialised` names the modules to be trained and saved with every adapter: those the checkpoint did not have
    (head, pooler), and the output layer. `fingerprint` is over all the rest. `source` says where it came from and
    `notes` what had to be handled, for people; `address` is what Transformers' `from_pretrained` finds it by elsewhere,
    and never a path of this machine. `licence` is the checkpoint's, where it says one.
    `pooling` is what the head of a text classifier reads, or what is made a text's vector (mean, first, last, pooler);
    None where that is not known.
    `quantize` is how the linear layers of the trunk are held, and `image_size` the side of images that was asked for,
    as in a run's spec.
    """

    name: str
    model: Any
    processor: Any
    modality: Literal["text", "image"]
    newly_initialised: list[str]
    fingerprint: str
    source: str
    address: str
    notes: list[str] = field(default_factory=list)
    pooling: str | None = None
    licence: str | None = None
    quantize: str | None = None
    image_size: int | None = None


def load(
    name: str,
    *,
    kind: str,
    num_labels: int | None = None,
    label_names: Sequence[str] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    image_size: int | None = None,
    pooling: str = AUTO,
    quantize: str | None = None,
    compute_dtype: torch.dtype | None = None,
    held: torch.dtype | None = None,
) -> Backbone:
    """The backbone called `name` (hub id, folder, `embedded:<name>`) with a head for this kind of task.

    `seed` alone decides the new head's weights. `dtype` is that of the loaded model, whatever the checkpoint is stored
    in. `image_size` makes the image processor give another size than the checkpoint's, where the model can read it;
    a transformer's table of positions is interpolated for it, once.
    `pooling` is what the head of a text classifier reads: auto (what the checkpoint was made for, if it says so), own
    (what its architecture has it read, whatever the checkpoint says), mean, first, last or pooler.

    `quantize` (4bit, 8bit, int8, int4) holds the linear layers of the trunk in fewer bits, on this process's
    accelerator where it has one. They multiply in `compute_dtype` (None: `dtype`), and what else is frozen is kept in
    it. The fingerprint is that of the full weights in `dtype`.

    `held` is a type of half precision: a language model whose checkpoint is stored in it, and has all its parts, is
    left in it, and on a CUDA device with room for it. Its fingerprint is still that of `dtype`.
    """
    labels = _labels(kinds.get(kind), num_labels, label_names)
    if quantize is not None and kinds.get(kind).has_captions:
        raise InlayError(
            f"quantize={quantize!r}: a model of kind {kind!r} has two towers and is held whole. Leave it out."
        )
    place = locate.find(name, revision)
    if image_size is not None and place.modality != "image":
        raise InlayError(f"image_size={image_size}: {name!r} reads {place.modality}. Leave it out.")
    chosen = poolings.settle(place, kind, pooling)
    notes = [*place.notes, *poolings.doubts(place, kind, pooling)]
    with quiet(), new_parts.seeded(seed):
        config = _config(place, trust_remote_code)
        auto_class = _auto_class(kinds.get(kind), place, config, trust_remote_code)
        own_labels = dict(config.id2label or {})
        _set_labels(config, labels, kinds.get(kind).loss)
        digests: dict[str, bytes] = {}
        held = held if kinds.get(kind).head is kinds.LANGUAGE and _stored_dtypes(place) == {held} else None
        with _quantising(quantize, compute_dtype or dtype, auto_class, config, trust_remote_code, digests) as how:
            straight = how if held is None else {**how, **_straight_to_gpu(place)}
            model, report = _from_pretrained(place, auto_class, config, held or dtype, trust_remote_code, straight)
            if held is not None and new_parts.new_modules(model, report, name, language=not labels):
                held = model = None  # a new part is made in `dtype`, and would not work with a trunk in another
                with new_parts.seeded(seed):
                    model, report = _from_pretrained(place, auto_class, config, dtype, trust_remote_code, how)
        pooled.install(model, chosen)
        if kinds.get(kind).head is kinds.MASKED:
            _check_fills_masks(model, report, name)
        if kinds.get(kind).head is kinds.READER:
            answer_outputs.install(model)
            model.__dict__.pop("_weight_conversions", None)  # saved under the names that this class has
            own_labels = dict(enumerate(labels))  # of every head for answers, whatever they are called
        both = kinds.get(kind).has_captions
        bare = both or kinds.get(kind).head is kinds.VECTOR
        new = new_parts.new_modules(model, report, name, language=not labels, bare=bare)
        kept = _keep_or_renew(model, new, labels, own_labels, seed, notes)
        if new and not labels:
            notes.append(f"the checkpoint has no {', '.join(new)}: it was drawn at random and must be trained")
        if both:
            towers.install(model)
            processor = processors.both_processors(place, model, trust_remote_code, image_size, notes)
        elif place.modality == "text":
            processor = processors.text_processor(place, model, trust_remote_code, notes)
        else:
            processor = processors.image_processor(place, model.config, trust_remote_code, image_size, notes)
            image_sizes.agree_on_size(model, processor, name, image_size is not None, locate.IMAGE_PROCESSOR)
    new = [*new, *kept]
    notes += _remarks(place, model if bare else getattr(model, new_parts.trunk(model)), held or dtype)
    model.config._name_or_path = model.name_or_path = name
    reads = poolings.reads(place) if kinds.get(kind).head is kinds.SEQUENCE else None
    if quantize is not None:
        quantised.finish(model, digests, compute_dtype or dtype, new)
    return Backbone(
        name=name,
        model=model,
        processor=processor,
        modality=place.modality,
        newly_initialised=new,
        fingerprint=fingerprint(model, new, None if held is None else dtype),
        source=place.source,
        address=_address(place),
        notes=notes,
        pooling=chosen or reads,
        licence=locate.licence(place),
        quantize=quantize,
        image_size=image_size,
    )


def load_backbone(
    name: str, *, kind: str | None = None, num_labels: int | None = None, pooling: str = AUTO, **others: Any
) -> Backbone:
    """A model by its name, ready to be adapted: `.model` and `.processor` (its tokenizer, or for images its processor).

        backbone = inlay.load_backbone("embedded:minilm", num_labels=3)
        model = get_peft_model(backbone.model, inlay.BiasTuningConfig())

    `name` is a hub id, a folder or `embedded:<name>`. `kind` is one of `inlay.tasks.KINDS`; None: image classification
    for a model of images, causal-lm for a decoder, else classification. A head has 2 outputs unless `num_labels` or
    `label_names` says otherwise. `pooling` is what a text classifier's head reads, and must be what an adapter was
    trained with. `others` are those of `inlay.backbones.load`, which this calls.
    """
    if kind is None:
        images, built = locate.modality(name, others.get("revision")) == "image", None
        if not images:
            built = locate.kind(name, others.get("revision"))
        kind = kinds.IMAGES if images else kinds.CAUSAL_LM if built == "decoder" else kinds.CLASSIFICATION
    if num_labels is None and others.get("label_names") is None and kinds.get(kind).has_classes:
        num_labels = 2
    return load(name, kind=kind, num_labels=num_labels, pooling=pooling, **others)


def load_for(spec: Spec, task: Task | TaskSchema, held: torch.dtype | None = None) -> Backbone:
    """The backbone of a run, with the head that its task needs; for `held` see `load`.

    A spec that comes from a file of somebody's must not say whether the model's own code may run: set its
    `trust_remote_code` to what the user here allows.
    """
    backbone = load(
        spec.model,
        kind=task.kind,
        num_labels=task.num_labels,
        label_names=task.output_names,
        revision=spec.revision,
        trust_remote_code=spec.trust_remote_code,
        seed=spec.seed,
        pooling=spec.pooling,
        quantize=spec.quantize,
        image_size=spec.image_size,
        compute_dtype=pick_dtype(spec.precision, pick_device(), strict=False),
        held=held,
    )
    schema: Any = getattr(task, "schema", task)
    losses.install(backbone.model, losses.of_schema(schema))
    if kinds.get(task.kind).has_captions and schema.captions:
        towers.set_captions(backbone.model, backbone.processor, schema.captions)
    return backbone


def _labels(kind: kinds.TaskKind, num_labels: int | None, label_names: Sequence[str] | None) -> list[str]:
    """The names of the outputs of the new head; none for language models."""
    if kind.predicts in ("text", "vector", "masked") or kind.has_captions:
        return []
    if kind.predicts == "span":
        return list(SPAN_OUTPUTS)
    if kind.predicts == "value":
        if num_labels not in (None, 1):
            raise InlayError(f"Regression predicts one number; num_labels={num_labels} does not fit. Leave it out.")
        return list(map(str, label_names or ["value"]))[:1]
    if label_names is not None:
        if num_labels not in (None, len(label_names)):
            raise InlayError(
                f"num_labels={num_labels}, but there are {len(label_names)} label names. Give one of them."
            )
        num_labels = len(label_names)
    if num_labels is None or num_labels < 1:
        raise InlayError(f"{kind.name} needs num_labels of at least 1, or label_names; got num_labels={num_labels}.")
    return list(map(str, label_names)) if label_names is not None else [f"LABEL_{i}" for i in range(num_labels)]


def _set_labels(config: Any, labels: list[str], problem: str | None) -> None:
    if labels:
        config.num_labels = len(labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
        # Left open, Transformers would guess it from the first batch and write the guess into the config.
        config.problem_type = problem


def _config(place: Location, trust_remote_code: bool) -> Any:
    """The typed config; a model that brings its own code is refused unless that was asked for."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if not trust_remote_code and place.config.get("model_type") not in CONFIG_MAPPING and "auto_map" in place.config:
        raise InlayError(
            f"{place.name!r} brings its own Python code. Read it, and if you trust it pass trust_remote_code=True "
            "(--trust-remote-code)."
        )
    if place.model_type == "timm_wrapper" and find_spec("timm") is None:
        raise InlayError(f"{place.name!r} is a timm model: install them with `pip install 'inlay[timm]'`.")
    try:
        config = AutoConfig.from_pretrained(place.path, trust_remote_code=trust_remote_code, **place.arguments)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise InlayError(f"config.json of {place.name!r} was refused: {first_line(error)}") from error
    # Where two classes answer to a task, the one with a teacher's head cannot be trained; None breaks the choice.
    config.architectures = [a for a in config.architectures or [] if not a.endswith("WithTeacher")]
    return config


def _auto_class(kind: kinds.TaskKind, place: Location, config: Any, trust_remote_code: bool) -> str:
    """What loads this architecture for this kind of task, or an error that names what it can do."""
    model_type, language = place.model_type, kind.head is kinds.LANGUAGE
    two_parts = model_type in heads("sequence-to-sequence") and (
        getattr(config, "is_encoder_decoder", False) or model_type not in heads("causal-lm")
    )
    auto_class = "AutoModelForSeq2SeqLM" if language and two_parts else kind.head.auto_class
    if trust_remote_code and auto_class in getattr(config, "auto_map", {}):
        return auto_class
    both_ways = model_type in heads("masked-lm") and not getattr(config, "is_decoder", False)
    can = [
        name
        for name, entry in kinds.TABLE.items()
        if model_type in heads(entry.head.name)
        and not (entry.head is kinds.LANGUAGE and (both_ways or two_parts))
        and not (entry.head is kinds.READER and two_parts)
    ]
    # Of runs from before there was a kind for two parts.
    if kind.name not in can and not (language and two_parts):
        reason = ", because it reads in both directions" if language and both_ways else ""
        if kind.head is kinds.READER and two_parts:
            reason = ", because it has an encoder and a decoder, and an answer is found by one of them"
        able = f"It can do: {', '.join(can)}." if can else "inlay has no task for this architecture."
        raise InlayError(
            f"{place.name!r} ({model_type}) cannot do {kind.name}{reason}. {able} Choose another model or task."
        )
    return auto_class


def _from_pretrained(
    place: Location,
    auto_class: str,
    config: Any,
    dtype: torch.dtype,
    trust_remote_code: bool,
    how: Mapping[str, Any],
) -> tuple[Any, dict[str, Any]]:
    import transformers

    try:
        with _read_in_pieces():
            return getattr(transformers, auto_class).from_pretrained(
                place.path,
                config=config,
                key_mapping=_renamed(auto_class, config),
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
                **place.arguments,
                **how,
            )
    except InlayError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, SafetensorError) as error:
        raise InlayError(f"{place.name!r} could not be loaded: {first_line(error)}") from error


def _renamed(auto_class: str, config: Any) -> dict[str, str] | None:
    """The names of weights to change: heads for answers of decoders call their body otherwise than checkpoints do."""
    from transformers import MODEL_FOR_QUESTION_ANSWERING_MAPPING
    from transformers.modeling_layers import GenericForQuestionAnswering

    if auto_class != kinds.READER.auto_class or type(config) not in MODEL_FOR_QUESTION_ANSWERING_MAPPING:
        return None
    found: Any = MODEL_FOR_QUESTION_ANSWERING_MAPPING[type(config)]
    other = issubclass(found, GenericForQuestionAnswering) and found.base_model_prefix == "transformer"
    return {r"^model\.": "transformer."} if other else None


@contextmanager
def _quantising(
    quantize: str | None,
    dtype: torch.dtype,
    auto_class: str,
    config: Any,
    trust_remote_code: bool,
    digests: dict[str, bytes],
) -> Iterator[dict[str, Any]]:
    """The arguments by which a model of this config is quantised while it is loaded."""
    if quantize is None:
        yield {}
        return
    import transformers

    quantised.check(quantize)
    if getattr(config, "quantization_config", None) is not None:
        raise InlayError(f"quantize={quantize!r}: the checkpoint is quantised already. Leave it out.")
    with torch.device("meta"):
        empty = getattr(transformers, auto_class).from_config(config, trust_remote_code=trust_remote_code)
    with quantised.loading(quantize, dtype, empty, digests) as how:
        yield how


def _straight_to_gpu(place: Location) -> dict[str, Any]:
    """The argument by which a model is loaded onto the GPU without a stop, where it is known to have room for it."""
    device = pick_device()
    if device.type != "cuda" or place.folder is None:
        return {}
    size = sum(file.stat().st_size for file in locate.weight_files(place.folder, place.name))
    return {"device_map": {"": device}} if torch.cuda.mem_get_info(device)[0] > ROOM * size else {}


def _address(place: Location) -> str:
    """The hub id of an embedded model, whose name means nothing outside inlay; of any other, its name."""
    hub = embedded.card(place.name).hub if place.name.startswith(embedded.PREFIX) else None
    return hub or locate.portable(place.name)


@contextmanager
def _read_in_pieces() -> Iterator[None]:
    """Have Transformers read tensor by tensor in place of mapping whole files.

    A mapped file stays resident beside its converted copy (1.5 times the model for half-precision files), and a model
    whose weights are the file itself dies when that file is overwritten.
    """
    from transformers import modeling_utils

    def reading(filename: Any, framework: str, device: Any = "cpu", **_: Any) -> Any:
        return safe_open(filename, framework=framework, device=device, backend="pread")

    mapped = modeling_utils.safe_open
    modeling_utils.safe_open = reading
    try:
        yield
    finally:
        modeling_utils.safe_open = mapped


def _keep_or_renew(
    model: Any, new: list[str], labels: list[str], own_labels: dict[int, str], seed: int, notes: list[str]
) -> list[str]:
    """Draw the new modules; returns an output layer that the checkpoint had and that is trained on.

    A head of the right shape is kept only where its labels are this task's. Otherwise its output layer is drawn anew
    too: the shape of another task's answer is no reason to start from it.
    """
    kept: list[str] = []
    output = new_parts.output_layer(model, len(labels)) if labels else None
    if output is not None and not any(f"{output}.".startswith(f"{name}.") for name in new):
        if [str(own_labels.get(index)) for index in range(len(labels))] == labels:
            notes.append("the checkpoint's own head has these labels: training goes on from it")
            kept = [output]
        else:
            notes.append("the checkpoint's own head has other labels: its output layer is drawn anew")
            new.append(output)
    new_parts.draw(model, new, seed)
    return kept


def _check_fills_masks(model: Any, report: Mapping[str, Any], name: str) -> None:
    """An error for a checkpoint without the head that fills masks, whose output layer is its embeddings."""
    trunk = new_parts.trunk(model)
    absent = sorted(key for key in report["missing_keys"] if not key.startswith(f"{trunk}."))
    if absent:
        raise InlayError(
            f"{name!r} has no head that fills masks (it lacks {absent[0]}): masked-lm goes on with one that was "
            "pretrained. Take a checkpoint for masks, such as google-bert/bert-base-uncased or FacebookAI/roberta-base."
        )


def _remarks(place: Location, backbone: Any, dtype: torch.dtype) -> list[str]:
    """What is odd about these weights."""
    remarks = []
    stored = _stored_dtypes(place)
    if stored - {dtype}:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in stored))
        remarks.append(f"stored as {names}, loaded as {str(dtype).removeprefix('torch.')}")
    if dead := _dead_dimensions(backbone):
        shown = ", ".join(map(str, dead[:8])) + (", ..." if len(dead) > 8 else "")
        remarks.append(
            f"dead dimensions in the last layer ({shown}): the same for every text: do not divide by their spread"
        )
    return remarks


def _stored_dtypes(place: Location) -> set[torch.dtype]:
    """The floating-point types that the weights have on disk."""
    if place.folder is None:
        named = place.config.get("dtype") or place.config.get("torch_dtype")
        found = getattr(torch, str(named), None)
        return {found} if isinstance(found, torch.dtype) else set()
    short = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    found_types = set()
    for file in locate.weight_files(place.folder, place.name):
        with safe_open(file, framework="pt") as tensors:
            found_types |= {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
    return {short[each] for each in found_types if each in short}


def _dead_dimensions(backbone: Any) -> list[int]:
    """Dimensions that the last layer norm multiplies by nothing to speak of."""
    norms = [module for module in backbone.modules() if isinstance(module, nn.LayerNorm) and module.weight is not None]
    if not norms:
        return []
    scale = norms[-1].weight.detach().float().abs()
    return torch.nonzero(scale < 1e-6 * scale.median()).flatten().tolist()
