"""The part of a card's code that asks the loaded model something: written for one kind of task, to be pasted and run.

It needs what lies in the adapter's folder alone, and the base model: the tokenizer or image processor is beside the
weights, the names of the outputs and the task's template stand in the code. It imports inlay only for what Transformers
cannot prepare: marked spans, and texts with places for prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inlay.tasks import kinds, templates
from inlay.tasks.prepare import mark_characters
from inlay.tasks.schema import TaskSchema

Code = tuple[list[str], list[str]]
PLACE = "this/folder"  # stands for the adapter's, in code that is pasted
MOST_TOKENS = 40  # of a text that is written
QUESTION = "What can you tell me?"
MARKED = ("the first and the last", 4, 9)  # a text and a span of it
OFFSETS = 'return_offsets_mapping=True, return_tensors="pt"'
BLANK = 'Image.new("RGB", (64, 64))'
FILLED = 'return_tensors="pt", padding="max_length", truncation=True'
NO_GRADIENT = "with torch.no_grad():"


def write_example(schema: Mapping[str, Any], place: str, processor: str | None) -> Code:
    """Imports and lines that follow those which make `model`. `processor` is an expression for the tokenizer or image
    processor; None: it is loaded from `place`."""
    task = TaskSchema.from_json(schema)
    auto = "AutoImageProcessor" if task.modality == "image" else "AutoTokenizer"
    imports = ["import torch"] + ([f"from transformers import {auto}"] if processor is None else [])
    lines = [f"processor = {processor or f'{auto}.from_pretrained({json.dumps(place)})'}"]
    if task.has_captions:
        imports.append("from transformers import AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(place)})")
    plain = not kinds.get(task.kind).has_own_answers
    if task.has_captions:
        own_imports, own = _of_captions(task)
    elif task.modality == "image" and plain:
        own_imports, own = _of_image(task)
    elif task.kind == kinds.SPANS or task.prompt_tokens or not plain:
        own_imports, own = _by_schema(task)
    elif task.predicts == "tags":
        own_imports, own = _of_words(task)
    elif task.predicts == "vector":
        own_imports, own = _of_vectors(task)
    elif task.predicts == "masked":
        own_imports, own = _of_masks(task)
    elif task.predicts == "span":
        own_imports, own = _of_question(task)
    elif task.writes_text:
        own_imports, own = _of_conversation(task) if task.chat else _of_prompt(task)
    else:
        own_imports, own = _of_text(task)
    return [*imports, *own_imports], [*lines, *own]


def _shares(task: TaskSchema, outputs: str) -> str:
    """The line that makes probabilities of classes, as the run itself does."""
    scaled = outputs if task.temperature is None else f"({outputs} / {task.temperature!r})"
    return f"    shares = {scaled}.softmax(-1)[0].tolist()"


def _of_image(task: TaskSchema) -> Code:
    return ["from PIL import Image"], [
        f'image = {BLANK}  # yours: Image.open("photo.jpg").convert("RGB")',
        'inputs = processor(images=image, return_tensors="pt")',
        NO_GRADIENT,
        _shares(task, "model(**inputs).logits"),
        "answer = {model.config.id2label[i]: share for i, share in enumerate(shares)}",
        "print(answer)",
    ]


def _of_captions(task: TaskSchema) -> Code:
    """Texts are filled up to the length that the model reads: so SigLIP was pretrained, and to CLIP it is the same."""
    names = list(task.label_names or ("a text", "another one"))
    texts = list(task.captions) or names
    named = [f"names = {json.dumps(names, ensure_ascii=False)}"] if task.captions else []
    return ["from PIL import Image"], [
        *named,
        f"texts = {json.dumps(texts, ensure_ascii=False)}",
        f'image = {BLANK}  # yours: Image.open("photo.jpg").convert("RGB")',
        'pixels = processor(images=image, return_tensors="pt")["pixel_values"]',
        "most = model.config.text_config.max_position_embeddings",
        f"ids = tokenizer(texts, {FILLED}, max_length=most)['input_ids']",
        NO_GRADIENT,
        _shares(task, "model(input_ids=ids, pixel_values=pixels).logits_per_image"),
        f"answer = dict(zip({'names' if named else 'texts'}, shares))",
        "print(answer)",
    ]


def _of_text(task: TaskSchema) -> Code:
    row = _row(task.fields)
    first, second = templates.render(task.full_template, row, "[MASK]")
    mask = ".replace('[MASK]', processor.mask_token)" if templates.uses_mask(task.full_template) else ""
    given = json.dumps(first, ensure_ascii=False) + mask + (f", {json.dumps(second)}" if second is not None else "")
    lines = [
        f'inputs = processor({given}, truncation=True, max_length={_length(task)}, return_tensors="pt")',
        NO_GRADIENT,
    ]
    if task.predicts == "value":
        scale = f" * {task.deviation!r}" if task.deviation != 1 else ""
        shift = f" + {task.mean!r}" if task.mean else ""
        return [], [
            *lines,
            "    output = model(**inputs).logits[0, 0].item()",
            f"answer = output{scale}{shift}",
            "print(answer)",
        ]
    return [], [
        *lines,
        _shares(task, "model(**inputs).logits"),
        "answer = {model.config.id2label[i]: share for i, share in enumerate(shares)}",
        "print(answer)",
    ]


def _of_vectors(task: TaskSchema) -> Code:
    return [], [
        'texts = ["a text", "another one"]',
        f"cut = dict(padding=True, truncation=True, max_length={_length(task)})",
        'inputs = processor(texts, return_tensors="pt", **cut)',
        NO_GRADIENT,
        '    answer = model(**inputs)["logits"]  # a vector of length 1 for each text',
        "print(answer @ answer.T)",
    ]


def _of_words(task: TaskSchema) -> Code:
    return [], [
        'words = ["a", "few", "words"]',
        'text = " ".join(words)',
        "ends = [len(' '.join(words[: i + 1])) for i in range(len(words))]",
        f"inputs = processor(text, truncation=True, max_length={_length(task)}, {OFFSETS})",
        'offsets = inputs.pop("offset_mapping")[0].tolist()',
        NO_GRADIENT,
        "    best = model(**inputs).logits[0, -len(offsets):].argmax(-1).tolist()",
        "answer = []  # the tag of each word is that of its first token",
        "for i, end in enumerate(ends):",
        "    begin = ends[i - 1] if i else 0",
        "    token = next(at for at, (a, b) in enumerate(offsets) if a < b and begin < b <= end)",
        "    answer.append((words[i], model.config.id2label[best[token]]))",
        "print(answer)",
    ]


def _of_prompt(task: TaskSchema) -> Code:
    text, _ = templates.render(task.full_template, _row(task.fields), "[MASK]")
    return [], [
        f'inputs = processor({json.dumps(text, ensure_ascii=False)}, return_tensors="pt")',
        *_generation(task),
    ]


def _of_conversation(task: TaskSchema) -> Code:
    return ["from inlay.tasks.chat_template import ChatTemplate"], [
        f'messages = [{{"role": "user", "content": {json.dumps(QUESTION)}}}]',
        "how = dict(add_generation_prompt=True, return_dict=True)",
        'inputs = processor.apply_chat_template(messages, return_tensors="pt", **how)',
        "ends = list(ChatTemplate(processor).stops)  # the tokens that end a turn",
        *_generation(task, ", eos_token_id=ends"),
    ]


def _generation(task: TaskSchema, more: str = "") -> list[str]:
    most = task.max_new_tokens or MOST_TOKENS
    return [
        'inputs.pop("token_type_ids", None)',
        NO_GRADIENT,
        f"    ids = model.generate(**inputs, max_new_tokens={most}, do_sample=False{more})",
        'begin = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]',
        "answer = processor.decode(ids[0, begin:], skip_special_tokens=True)",
        "print(answer)",
    ]


def _of_masks(task: TaskSchema) -> Code:
    text, _ = templates.render(task.full_template, _row(task.fields), "[MASK]")
    return [], [
        f'text = {json.dumps(text, ensure_ascii=False)} + f" {{processor.mask_token}}"',
        f'inputs = processor(text, truncation=True, max_length={_length(task)}, return_tensors="pt")',
        'at = inputs["input_ids"][0] == processor.mask_token_id',
        NO_GRADIENT,
        "    shares, tokens = model(**inputs).logits[0, at].softmax(-1).max(-1)",
        "answer = [(processor.decode([token]), share) for token, share in zip(tokens.tolist(), shares.tolist())]",
        "print(answer)",
    ]


def _of_question(task: TaskSchema) -> Code:
    nothing = (
        []
        if task.no_answer is None
        else [
            "nothing = first[0] + last[0]  # the first token's: there is no answer",
            f"answer = '' if nothing - worth.max() > {task.no_answer!r} else answer",
        ]
    )
    return [], [
        'question, context = "Who wrote it?", "It was written by Ada Lovelace in 1843."',
        f'cut = dict(truncation="only_second", max_length={_length(task)})  # a longer context: in windows, by inlay',
        f"inputs = processor(question, context, {OFFSETS}, **cut)",
        'offsets, sides = inputs.pop("offset_mapping")[0].tolist(), inputs.sequence_ids(0)',
        NO_GRADIENT,
        "    found = model(**inputs)",
        "first, last = (logits[0, -len(offsets):] for logits in (found.start_logits, found.end_logits))",
        "of_context = torch.tensor([side == 1 for side in sides])",
        "legal = (of_context[:, None] & of_context[None, :]).triu()  # from a token of the context to a later one",
        "worth = (first[:, None] + last[None, :]).masked_fill(~legal, float('-inf'))",
        "begin, end = divmod(int(worth.argmax()), len(offsets))",
        "answer = context[offsets[begin][0] : offsets[end][1]].strip()",
        *nothing,
        "print(answer)",
    ]


def _by_schema(task: TaskSchema) -> Code:
    """What inlay alone prepares, or can read."""
    row: dict[str, Any] = {**_row(task.fields), **(mark_characters(*MARKED) if task.kind == kinds.SPANS else {})}
    told = json.dumps(task.to_json(), ensure_ascii=False)
    imports, given = ["import json", "from inlay.tasks import TaskSchema"], f"row = {row!r}"
    if task.modality == "image":
        imports.append("from PIL import Image")
        given = f'row = {{"image": {BLANK}}}  # yours: Image.open("photo.jpg").convert("RGB")'
    return imports, [
        f"task = TaskSchema.from_json(json.loads({told!r}))",
        given,
        "encoded = task.encode_inputs([row], processor)",
        NO_GRADIENT,
        "    outputs = model(**task.collator(processor)([encoded[0]])).logits.float().numpy()",
        "answer = task.decode(outputs, encoded)[0]",
        "print(answer)",
    ]


def _row(fields: Sequence[str]) -> dict[str, str]:
    """A row that says which field stands where."""
    return {name: f"the {name}" for name in fields}


def _length(task: TaskSchema) -> str:
    return str(task.max_length) if task.max_length is not None else "None"
