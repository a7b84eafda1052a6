"""What a task, its tokenizer and the model tell InfoPrompt: the template, where Z is read, the words to start from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.anatomy import anatomy
from inlay.backbones.pooled import installed
from inlay.errors import InlayError
from inlay.methods.infoprompt.config import tokens_of
from inlay.methods.infoprompt.model import usual_state
from inlay.methods.plain import base_of
from inlay.tasks import kinds, prompts, templates
from inlay.tasks.schema import TaskSchema

CUE = "Answer:"  # what a text ends in, in a decoder, where the task has no words of its own for that


def for_task(
    settings: Mapping[str, Any], schema: TaskSchema, tokenizer: Any, model: Any
) -> tuple[dict[str, Any], TaskSchema, list[str]]:
    """The settings with what can be told, the schema with places for prompts, and what a person should know."""
    given = dict(settings)
    if schema.modality != "text" or schema.writes_text:
        return given, schema, []  # refused when the method is attached, with a reason
    causal = anatomy(model).kind == "decoder"
    given = tokens_of(tokenizer) | given
    if given.get("initial_words"):
        given |= {"initial": "words", "initial_ids": _tokens(given["initial_words"], tokenizer, "initial_words")}
    notes: list[str] = []
    if schema.kind == kinds.TOKENS:
        given.setdefault("state", "last" if causal else "mean")
        if given["state"] == "mask":
            raise InlayError("state='mask': a text to be tagged has no mask. Read the mean, first or last state.")
        return given, schema, notes
    if given.get("state") is None:
        given["state"] = installed(model) or usual_state(model.config, given["mask_token_id"], causal=causal)
    if given["state"] == "mask" and causal:
        raise InlayError(
            f"state='mask': {type(base_of(model)).__name__} reads from left to right and has no mask. Read the last "
            "state, which is its default, the first or the mean."
        )
    schema = _placed(given, schema, tokenizer, causal=causal)
    given |= {"template": schema.prompt_template, "placeholders": True}
    notes.append(f"template {schema.prompt_template!r}; Z is read at {_in_words(given['state'])}")
    words = _label_words(given, schema)
    unknown = [] if words is None or given.get("label_words") else [w for w in words if not _ids(w, tokenizer)]
    if unknown:
        notes.append(
            f"class vectors start from random numbers: the tokenizer does not know {', '.join(unknown)}; give "
            "label_words that it knows"
        )
    elif words is not None:
        given["label_words"] = list(words)
        given["label_ids"] = [_tokens(word, tokenizer, "label_words") for word in words]
        several = [word for word, ids in zip(words, given["label_ids"], strict=True) if len(ids) > 1]
        if several:
            notes.append(f"of several tokens, whose mean starts the class vector: {', '.join(several)}")
    return given, schema, notes


def _placed(given: Mapping[str, Any], schema: TaskSchema, tokenizer: Any, *, causal: bool) -> TaskSchema:
    """The schema with a template that has places for prompts and, where Z is read there, a mask.

    In a decoder words stand at the end, and prompts before the text: they are made of `Phi(X)`, and from between the
    text and where Z is read the class vectors likely learn that state again, not what the model makes of text and
    prompts. Two segments whose tokenizer puts nothing between them are divided by a line break.
    """
    fields = kinds.fields_of(schema.kind, schema.fields)
    template = given.get("template") or schema.prompt_template
    if template is None:
        first, sign, second = schema.full_template.partition(f"{{{templates.SEPARATOR}}}")
        template = prompts.with_places(f"{first} {{{templates.MASK}}}{sign}{second}")
    templates.check(template, fields)
    if causal and given["state"] == "last":
        cue = given.get("cue")
        template = prompts.left_to_right(template, (schema.cue or CUE) if cue is None else cue)
        if tokenizer.num_special_tokens_to_add(pair=True) == tokenizer.num_special_tokens_to_add(pair=False):
            template = template.replace(f"{{{templates.SEPARATOR}}}", "\n")
        templates.check(template, fields)
    else:
        template = prompts.with_places(template)
        if given["state"] != "mask":
            template = prompts.without_mask(template)
        elif not templates.uses_mask(template):
            raise InlayError(
                f"The template {template!r} has no {{mask}}, where Z is read. Put one in, or set state to mean, first"
                " or last."
            )
    return dataclasses.replace(schema, prompt_template=template, prompt_tokens=given.get("num_prompt_tokens", 4))


def _label_words(given: Mapping[str, Any], schema: TaskSchema) -> Sequence[str] | None:
    """A word an output: the user's, the task's, or the labels' own names where they are words; values have none."""
    names = schema.output_names
    if names is None or not kinds.get(schema.kind).has_probabilities:
        return None
    words = given.get("label_words") or schema.words
    if words is not None:
        if len(words) != len(names):
            raise InlayError(f"label_words={list(words)!r}: give {len(names)}, one for each of {', '.join(names)}.")
        return words
    plain = [name.replace("_", " ").replace("-", " ").strip() for name in names]
    return plain if all(name and name.replace(" ", "").isalpha() for name in plain) else None


def _tokens(word: str, tokenizer: Any, setting: str) -> list[int]:
    """The tokens of a word as it stands within a text."""
    if not (ids := _ids(word, tokenizer)):
        raise InlayError(f"{setting}: {word!r} is no word that the tokenizer knows. Take another.")
    return ids


def _ids(word: str, tokenizer: Any) -> list[int]:
    """Its tokens; none where the tokenizer does not know one of them."""
    ids = list(tokenizer(f" {word.strip()}", add_special_tokens=False, verbose=False)["input_ids"])
    return [] if set(ids) & {tokenizer.unk_token_id} else ids


def _in_words(state: str) -> str:
    return {"mean": "the mean of the tokens", "first": "the first token", "last": "the last token"}.get(
        state, "the mask"
    )
