"""Write a base model with an adapter folded in: an ordinary checkpoint, which Transformers alone loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, first_line, unknown
from inlay.methods.card import write_merged_card
from inlay.records.atomic import write_folder
from inlay.records.store import Run
from inlay.tasks import answers, kinds
from inlay.tasks.templates import SEPARATOR
from inlay.workflow.adapted import EXAMPLES, Adapted, find_source, load_adapted, make_example
from inlay.workflow.notes import Say, or_log
from inlay.workflow.predict import LoadOptions
from inlay.workflow.tune import DEFAULT_OUT

TOKENS = 8
DTYPES = ("float32", "bfloat16", "float16")


def merge(
    adapter: Run | Path | str,
    output: Path | str,
    *,
    task: str | None = None,
    model: str | None = None,
    dtype: str = DTYPES[0],
    out: Path | str = DEFAULT_OUT,
    trust_remote_code: bool = False,
    say: Say | None = None,
) -> Path:
    """Write the model of a run, with what it trained folded into its weights, into the new folder `output`.

    `adapter` is a run (by itself, by its folder, or its name under `out`), or the folder of an adapter in PEFT's
    format, whoever trained it. The folder has what `save_pretrained` writes: config with the label names, weights,
    tokenizer or image processor; and a card. `AutoModelFor...from_pretrained` loads it, with neither inlay nor PEFT,
    and it computes what the adapted model does, up to a rounding. `dtype` is that of the written weights. Of several
    tasks `task` names the one. `model` names the base model where it has moved since. It is written whole or not at
    all. What a method trains must fit into weights (`Method.mergeable`), else it is an error.
    """
    from inlay.methods.merging import check_mergeable, is_held, may_be_held

    say = or_log(say)
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    target = Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InlayError(f"{target} is there already: give the name of a new folder.")
    source = find_source(adapter, task, out)
    check_mergeable(source.method)
    held = dtype if dtype != DTYPES[0] and may_be_held(source.method) else None
    how: LoadOptions = {"model": model, "trust_remote_code": trust_remote_code, "say": say}
    adapted = load_adapted(source, held, **how)
    _check_portable(adapted)
    notes = [*_notes(adapted)]
    if source.run is not None and source.run.spec.quantize is not None:
        notes.append(
            f"it was trained on weights in {source.run.spec.quantize} and merged into the full ones: outputs differ "
            "from those in training by the error of that rounding"
        )
    for line in notes:
        say(line)
    held = held if is_held(adapted.model) else None
    plain, why = _try_to_fold(adapted, dtype) if held is not None else (None, None)
    if plain is None:
        if why is not None:
            say(f"merged in float32, which takes more memory: not in {held}, because {why}")
            del adapted  # makes room
            adapted = load_adapted(source, **how)
        plain = _fold(adapted, dtype)

    def fill(place: Path) -> None:
        from inlay.console import quiet
        from inlay.methods.saving import write_pooling

        with quiet():
            plain.save_pretrained(place)
            _with_template(adapted).save_pretrained(place)
        if kinds.get(adapted.kind).head is kinds.VECTOR:  # no head would read it otherwise: the files say what to pool
            write_pooling(plain, place)
        if adapted.about is not None:
            write_merged_card(place, adapted.method, adapted.about, type(plain).__name__, notes)

    write_folder(target, fill)
    return target


def _with_template(adapted: Adapted) -> Any:
    """The tokenizer with the chat template of training, which is the one that the model knows."""
    if adapted.schema is not None and adapted.schema.chat and adapted.schema.chat_template is not None:
        adapted.processor.chat_template = adapted.schema.chat_template
    return adapted.processor


def _check_portable(adapted: Adapted) -> None:
    """An error for a model that would be another one without inlay."""
    from inlay.backbones.pooled import installed
    from inlay.methods.plain import base_of

    base = base_of(adapted.model)
    if (pooling := installed(base)) is not None and kinds.get(adapted.kind).predicts != "vector":
        raise InlayError(
            f"The head of this model reads pooling={pooling!r}, and {type(base).__name__} by itself reads another "
            "state of the text: loaded without inlay, the merged checkpoint would answer otherwise without a word. "
            "Keep the adapter (`inlay predict`, `inlay serve`, inlay.load), or train again with --pooling own."
        )
    images = getattr(adapted.processor, "image", adapted.processor)  # beside which a tokenizer may lie
    if type(images).__module__.startswith("inlay."):
        raise InlayError(
            f"Images for {type(base).__name__} are prepared by inlay ({type(adapted.processor).__name__}), and "
            "Transformers has no processor that does the same. Keep the adapter."
        )
    if type(base).__module__.startswith("transformers_modules."):
        raise InlayError(
            f"{type(base).__name__} is made by code that came with the model: the merged checkpoint would not load "
            "without it. Keep the adapter."
        )


def _notes(adapted: Adapted) -> Iterator[str]:
    """What a reader of the checkpoint must do beside loading it."""
    schema = adapted.schema
    if schema is None:
        return
    if schema.predicts == "value" and (schema.mean, schema.deviation) != (0.0, 1.0):
        yield (
            f"the model's output is scaled, as it was in training: value = output * {schema.deviation!r} + "
            f"{schema.mean!r}"
        )
    names = ", ".join(schema.label_names or ())
    if schema.predicts == "values":
        scales = zip(schema.label_names or (), schema.deviations or (), schema.means or (), strict=True)
        each = "; ".join(f"{name} = output * {spread!r} + {mean!r}" for name, spread, mean in scales)
        yield f"the model's outputs are scaled, as they were in training: {each}"
    if schema.temperature is not None:
        yield f"the probability of each class is the softmax of the model's outputs divided by {schema.temperature!r}"
    if schema.predicts == "shares":
        yield "the softmax of the model's outputs is the probability of each class"
    if schema.predicts == "labels":
        limits = ", ".join(map(str, answers.thresholds_of(schema)))
        yield f"a label is given where the sigmoid of its output reaches its threshold: {names} from {limits}"
    if schema.predicts == "rank":
        yield (
            f"the classes are, from the lowest: {names}. Output k is the logit of being above class k for what is not "
            "below it: the product of the sigmoids of the first k outputs is the probability of being above class k"
        )
    if schema.has_captions:
        for name, text in zip(schema.label_names or (), schema.captions, strict=True):
            yield f"the class {name!r} is the text {text!r}"
        if adapted.processor.padded:
            length = adapted.processor.length
            yield f"texts are filled up to {length} tokens (padding='max_length'), and the model is given no mask"
    if schema.predicts == "span":
        yield "it reads a question and a context as a pair of texts, and gives the logits of an answer's two ends"
        if schema.no_answer is not None:
            yield (
                "the first token stands for no answer: there is none where the sum of its two logits, minus that of "
                f"the best answer, is above {schema.no_answer:.6g}"
            )
        if schema.max_length is not None:
            yield f"longer contexts were read in windows of {schema.max_length} tokens that overlap"
        return
    if schema.predicts == "vector" and adapted.about is not None:
        yield f"a text's vector is its states pooled by {adapted.about.pooling}, as 1_Pooling/config.json says"
        return
    template = schema.full_template
    if schema.modality == "text" and schema.predicts != "tags" and template != f"{{{schema.fields[0]}}}":
        pair = " ({sep}: the tokenizer is given a pair of texts)" if f"{{{SEPARATOR}}}" in template else ""
        yield f"a text is made by the template {template!r}{pair}"
    if schema.max_length is not None:
        yield f"texts were cut at {schema.max_length} tokens"


def _try_to_fold(adapted: Adapted, dtype: str) -> tuple[Any, str | None]:
    """The merged model, or None and why there is none."""
    try:
        return _fold(adapted, dtype), None
    except InlayError as error:
        return None, first_line(error)


def _fold(adapted: Adapted, dtype: str) -> Any:
    import torch

    from inlay.console import quiet
    from inlay.methods.merging import fold

    with quiet():
        plain: Any = fold(adapted.model, adapted.method, _example(adapted), getattr(torch, dtype))
    if adapted.schema is not None and adapted.schema.predicts == "shares":
        plain.config.problem_type = "single_label_classification"  # for pipelines, which take the softmax by it
    return plain.eval()


def _example(adapted: Adapted) -> dict[str, Any]:
    """A batch on which the merged model must compute the same. Of a language model it has tokens whose own embeddings
    are adapted; every token more costs time where the model is large enough to be held in half precision."""
    import torch

    from inlay.methods.merging import adapted_ids, is_held

    if kinds.get(adapted.kind).head is not kinds.LANGUAGE or getattr(adapted.model.config, "is_encoder_decoder", False):
        return make_example(adapted)
    if is_held(adapted.model):
        batch = {name: value[:, :TOKENS] for name, value in make_example(adapted, EXAMPLES[:1]).items()}
    else:
        batch = make_example(adapted)
    if ids := adapted_ids(adapted.model):
        width = batch["input_ids"].shape[1]
        rows = torch.tensor([*ids, *[ids[-1]] * (-len(ids) % width)]).view(-1, width)
        more = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        batch = {name: torch.cat([value, more[name]]) for name, value in batch.items()}
    return batch
