"""From rows to tokens: templates filled, sub-words aligned, texts cut where the model ends, all counted.

Everything is tokenised once, up front, and kept as flat integer arrays, so that the result has a length, is the same
every time, and takes little memory. Cutting is never silent: `Encoded.cut` says how many rows lost something.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from inlay.errors import InlayError
from inlay.tasks import prepare, templates
from inlay.tasks.cells import as_text

T = TypeVar("T")

IGNORED = -100
DEFAULT_LENGTH = 512
_SHOWN = 100  # characters of a template in an error
_BATCH = 1000
_BLANKS = ("\u2581", "\u0120")  # how SentencePiece and byte-level tokenizers write a blank at the beginning of a token
# Architectures whose position table starts after the padding index.
_OFFSET_POSITIONS = ("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "mpnet", "longformer", "data2vec-text")
# Architectures whose positions are relative: a number in their config is no limit.
_RELATIVE_POSITIONS = ("t5", "mt5", "umt5", "longt5")


def length_limit(tokenizer: Any, config: Any = None) -> int | None:
    """The most tokens the model can read, as its tokenizer and its config say; None when nothing limits it."""
    limits = []
    said = getattr(tokenizer, "model_max_length", None)
    if said is not None and said < 1 << 24:
        limits.append(int(said))
    model_type = getattr(config, "model_type", None)
    if config is not None and model_type not in _RELATIVE_POSITIONS:
        positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        if positions and positions > 0:
            offset = (getattr(config, "pad_token_id", None) or 0) + 1 if model_type in _OFFSET_POSITIONS else 0
            limits.append(int(positions) - offset)
    return min(limits) if limits else None


def check_room(length: int, tokenizer: Any, template: str, *, writes: bool) -> None:
    """Refuse a length in which nothing of a text has room; tokenizers leave the texts uncut then, or empty.

    What a model learns to write (`writes`) is predicted from what stands before it, so that takes two tokens.
    """
    own = 1 if writes else tokenizer.num_special_tokens_to_add(f"{{{templates.SEPARATOR}}}" in template)
    if length <= own:
        why = "one token has nothing to be predicted from" if writes else f"the tokenizer adds {own} tokens of its own"
        raise InlayError(
            f"max_length={length} has no room for a text: {why}. Give {own + 1} or more; where a method puts tokens "
            "before the text, fewer of them leave more room."
        )


class Ragged:
    """Lists of ints of different lengths in one flat array."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray) -> None:
        self.values = values
        self.offsets = offsets

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Ragged:
        lengths = np.fromiter((len(each) for each in lists), dtype=np.int64, count=len(lists))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return cls(np.fromiter((v for each in lists for v in each), np.int32, count=int(offsets[-1])), offsets)

    @classmethod
    def ones(cls, offsets: np.ndarray) -> Ragged:
        """A 1 for every place: the mask of rows that are not padded. It takes no memory."""
        return cls(np.broadcast_to(np.int8(1), (int(offsets[-1]),)), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self.values[self.offsets[index] : self.offsets[index + 1]].tolist()


class Encoded(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenised rows: items are dicts of lists of ints, ready for `TextCollator`.

    Token classification needs more to come back from tokens to words: `words` holds for each token the word it begins,
    -1 for the others; `sizes` how many words each row has, read or not; `tags` the true tag of each of them. `notes`
    are the things that a user should know of the encoding; `cut` and `targets_cut` count the rows whose text, or what
    is to be written of it, was too long. `taken` are the positions of the rows that were encoded, where some had to be
    left out.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Sequence[int]] | Ragged],
        labels: Sequence[Any] | Ragged | None = None,
        words: Sequence[Sequence[int]] | None = None,
        cut: int = 0,
        sizes: Sequence[int] | None = None,
        tags: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._columns = {
            name: values if isinstance(values, Ragged) else Ragged.of(values) for name, values in columns.items()
        }
        self.labels = labels
        self.words = words
        self.cut = cut
        self.targets_cut = 0
        self.notes: tuple[str, ...] = ()
        self.taken: Sequence[int] | None = None
        self.sizes = sizes
        self.tags = tags

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each row has."""
        return np.diff(self._columns["input_ids"].offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = {name: values[index] for name, values in self._columns.items()}
        if self.labels is not None:
            item["labels"] = self.labels[index]
        return item


# -------------------------------------------------------------------------------------------------- one or two texts


def encode_texts(
    rows: Sequence[Mapping[str, Any]], template: str, tokenizer: Any, max_length: int
) -> tuple[dict[str, list[list[int]]], int]:
    """The rows through the template and the tokenizer; of two segments the longer one is cut first.

    A template with a mask or with prompts is not cut at its end, where they may be: its fields give way instead, the
    longest first.
    """
    columns: dict[str, list[list[int]]] = {}
    cut = 0
    for batch in _batches(rows):
        firsts, seconds = _render(batch, template, tokenizer)
        whole = tokenizer(firsts, seconds, verbose=False)
        long = [len(ids) > max_length for ids in whole["input_ids"]]
        if any(long):
            if templates.is_kept_whole(template):
                batch = [
                    _shortened(row, template, tokenizer, max_length) if too_long else row
                    for row, too_long in zip(batch, long, strict=True)
                ]
                firsts, seconds = _render(batch, template, tokenizer)
            whole = tokenizer(firsts, seconds, truncation=True, max_length=max_length)
        cut += sum(long)
        for name, values in whole.items():
            columns.setdefault(name, []).extend(values)
    return _never_empty(columns, tokenizer), cut


def _render(rows: Iterable[Mapping[str, Any]], template: str, tokenizer: Any) -> tuple[list[str], list[str] | None]:
    pairs = [templates.render(template, row, getattr(tokenizer, "mask_token", None)) for row in rows]
    seconds = [second for _, second in pairs if second is not None]
    return [first for first, _ in pairs], seconds or None


def _batches(rows: Sequence[T]) -> Iterable[list[T]]:
    for start in range(0, len(rows), _BATCH):
        yield [rows[i] for i in range(start, min(start + _BATCH, len(rows)))]


def _shortened(row: Mapping[str, Any], template: str, tokenizer: Any, max_length: int) -> Mapping[str, Any]:
    """The row with every field cut to as many words as fit; to as many characters, where not even one word does."""
    names = templates.fields_of(template)
    texts = {name: as_text(row[name], name) for name in names}

    def of_words(count: int) -> Mapping[str, Any]:
        return {**row, **{name: " ".join(text.split()[:count]) for name, text in texts.items()}}

    def of_characters(count: int) -> Mapping[str, Any]:
        return {**row, **{name: text[:count] for name, text in texts.items()}}

    for narrowed, most in (
        (of_words, max(len(text.split()) for text in texts.values())),
        (of_characters, max(map(len, texts.values()))),
    ):
        if count := _most_that_fits(narrowed, most, template, tokenizer, max_length):
            return narrowed(count)
    if not _fits(of_words(0), template, tokenizer, max_length):
        raise InlayError(
            f"The template {_shown(template)} alone is longer than the {max_length} tokens that fit. Make it shorter, "
            "use fewer prompt tokens, or give a larger max_length."
        )
    return of_words(0)


def _shown(template: str) -> str:
    """A template in an error: the beginning of it, and how many prompt tokens it has."""
    prompts = template.count(templates.MARK)
    plain = re.sub(f"(?:{re.escape(templates.MARK)})+", f"{{{templates.PROMPT}}}", template)
    shown = repr(plain if len(plain) <= _SHOWN else f"{plain[:_SHOWN]}...")
    return f"{shown}{f' with {prompts} prompt tokens' * bool(prompts)}"


def _most_that_fits(
    narrowed: Callable[[int], Mapping[str, Any]],
    most: int,
    template: str,
    tokenizer: Any,
    max_length: int,
    least: int = 0,
) -> int:
    """The largest number of words, by bisection, with which the row still fits, as it is known to with the least."""
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = _fits(narrowed(middle), template, tokenizer, max_length)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _fits(row: Mapping[str, Any], template: str, tokenizer: Any, max_length: int) -> bool:
    firsts, seconds = _render([row], template, tokenizer)
    return len(tokenizer(firsts, seconds, verbose=False)["input_ids"][0]) <= max_length


def _never_empty(columns: dict[str, list[list[int]]], tokenizer: Any) -> dict[str, list[list[int]]]:
    """A text without a token (an empty one, with a tokenizer that adds none) becomes one end-of-text token."""
    for i, ids in enumerate(columns.get("input_ids", ())):
        if not ids:
            for name, values in columns.items():
                values[i] = [end_of_text(tokenizer) if name == "input_ids" else int(name == "attention_mask")]
    return columns


def end_of_text(tokenizer: Any) -> int:
    """The token that ends a text, or the one that comes nearest to it."""
    for name in ("eos_token_id", "sep_token_id", "bos_token_id", "pad_token_id"):
        if getattr(tokenizer, name, None) is not None:
            return int(getattr(tokenizer, name))
    raise InlayError(f"The tokenizer {type(tokenizer).__name__} has no end-of-text, separator or padding token.")


# ------------------------------------------------------------------------------------------------------------ spans


def encode_spans(
    rows: Sequence[Mapping[str, Any]], template: str, tokenizer: Any, max_length: int
) -> tuple[dict[str, list[list[int]]], int]:
    """As `encode_texts`, but a text that is too long is cut around what is marked in it, never through a mark.

    The window holds as much context as fits, in equal parts before and after while both last. Where there is no room
    for any, words between two marked entities go, from the middle; then words inside of the marks, in the same way. A
    template may also name `{left}` and `{right}`: what stands before and after the marked span.
    """
    fitted, cut = [], 0
    for batch in _batches(rows):
        batch = [_with_sides(row, row["text"], row["start"], row["end"]) for row in batch]
        firsts, seconds = _render(batch, template, tokenizer)
        lengths = [len(ids) for ids in tokenizer(firsts, seconds, verbose=False)["input_ids"]]
        for row, length in zip(batch, lengths, strict=True):
            if length > max_length:
                cut += 1
                row = _window(row, template, tokenizer, max_length)
            fitted.append(row)
    columns, _ = encode_texts(fitted, template, tokenizer, max_length)
    return columns, cut


def _with_sides(row: Mapping[str, Any], text: str, start: int, end: int) -> Mapping[str, Any]:
    """The row with this text, and what stands on both sides of its span."""
    return {**row, "text": text, "left": text[:start].strip(), "right": text[end:].strip()}


def _window(row: Mapping[str, Any], template: str, tokenizer: Any, max_length: int) -> Mapping[str, Any]:
    """The row with as many words around its span as fit, or with fewer in it: see `encode_spans`."""
    text, start, end = row["text"], row["start"], row["end"]
    before, after = text[:start].split(), text[end:].split()
    parts = prepare.pieces(text[start:end].strip())

    def narrowed(context: int) -> Mapping[str, Any]:
        left = min(context // 2, len(before))
        right = min(context - left, len(after))
        left = min(context - right, len(before))
        ahead = " ".join(before[len(before) - left :])
        first, span = len(ahead) + bool(ahead), text[start:end].strip()
        cut = " ".join(filter(None, (ahead, span, " ".join(after[:right]))))
        return _with_sides(row, cut, first, first + len(span))

    def hollowed(words: Mapping[str, int], characters: int | None = None) -> Mapping[str, Any]:
        kept = [_hollow(part, words.get(role), characters if role == "inside" else None) for role, part in parts]
        made = _with_sides(row, "".join(kept), 0, len("".join(kept)))
        return {**made, "span": kept[1].strip()} if "span" in row else made

    for narrower, least, most in (
        (narrowed, 0, len(before) + len(after)),
        (lambda count: hollowed({"between": count}), 0, _most_words(parts, "between")),
        (lambda count: hollowed({"between": 0, "inside": count}), 1, _most_words(parts, "inside")),
        (lambda count: hollowed({"between": 0, "inside": 1}, count), 0, max(len(part) for _, part in parts)),
    ):
        if _fits(narrower(least), template, tokenizer, max_length):
            return narrower(_most_that_fits(narrower, most, template, tokenizer, max_length, least))
    marks = " ".join(part for role, part in parts if role == "mark")
    raise InlayError(
        f"The marks {marks} and the template {_shown(template)} alone are longer than the {max_length} tokens that "
        "fit. Make it shorter, use fewer prompt tokens, or give a larger max_length."
    )


def _hollow(part: str, words: int | None, characters: int | None) -> str:
    """A part of a text with so many words of its beginning and end, each with so many characters; None: with all."""
    found = part.split()
    if words is None or (words >= len(found) and characters is None):
        return part
    first = (words + 1) // 2
    kept = found if words >= len(found) else [*found[:first], *found[len(found) - (words - first) :]]
    said = " ".join(word[:characters] for word in kept)
    ahead, behind = part[:1].isspace(), part[-1:].isspace()
    return f"{' ' * ahead}{said}{' ' * (behind and bool(said))}" or " "


def _most_words(parts: Iterable[tuple[str, str]], role: str) -> int:
    return max((len(part.split()) for is_, part in parts if is_ == role), default=0)


# ----------------------------------------------------------------------------------------------------------- tokens


def encode_tokens(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, max_length: int
) -> tuple[dict[str, list[list[int]]], list[list[int]], int]:
    """Sentences of words, and for each token the word it begins (-1: a special token or the rest of a word).

    Words are joined by spaces and found again by their characters, which works for every fast tokenizer. A token
    belongs to the word in which it ends: byte-level ones begin with the space before it.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InlayError(f"Token classification needs a fast tokenizer; {type(tokenizer).__name__} is not one.")
    columns: dict[str, list[list[int]]] = {}
    words: list[list[int]] = []
    cut = 0
    for batch in _batches(rows):
        texts = [" ".join(row["tokens"]) for row in batch]
        whole = tokenizer(texts, return_offsets_mapping=True, return_special_tokens_mask=True)
        long = [len(ids) > max_length for ids in whole["input_ids"]]
        if any(long):
            how = {"truncation": True, "max_length": max_length}
            whole = tokenizer(texts, return_offsets_mapping=True, return_special_tokens_mask=True, **how)
        cut += sum(long)
        offsets, special = whole.pop("offset_mapping"), whole.pop("special_tokens_mask")
        words += [_first_tokens(row["tokens"], offsets[i], special[i]) for i, row in enumerate(batch)]
        for name, values in whole.items():
            columns.setdefault(name, []).extend(values)
    if any(not ids for ids in columns.get("input_ids", ())):
        words = [each or [-1] for each in words]
    return _never_empty(columns, tokenizer), words, cut


def _first_tokens(tokens: Sequence[str], offsets: Sequence[tuple[int, int]], special: Sequence[int]) -> list[int]:
    ends = np.cumsum([len(word) + 1 for word in tokens]) - 1
    spaces = set(ends.tolist())
    found, seen = [], -1
    for (start, end), is_special in zip(offsets, special, strict=True):
        nothing = is_special or end <= start or end - 1 in spaces
        word = -1 if nothing else int(np.searchsorted(ends, end - 1, side="right"))
        found.append(word if word > seen else -1)
        seen = max(seen, word)
    return found


def align_labels(words: Sequence[int], labels: Sequence[int]) -> list[int]:
    """A word's label on its first token, nothing to learn elsewhere."""
    return [labels[word] if word >= 0 else IGNORED for word in words]


# -------------------------------------------------------------------------------------------------- language models


def encode_blocks(texts: Iterable[str], joint: str, tokenizer: Any, length: int) -> Encoded:
    """Running text in blocks of `length` tokens, all of it learnt; the last block is what is left.

    `joint` stands between the texts: a line break, or the end-of-text token of the tokenizer.
    """
    ids = array("i")
    chunk: list[str] = []
    size = 0

    def flush() -> None:
        ids.extend(tokenizer("".join(chunk), add_special_tokens=not ids, verbose=False)["input_ids"])
        chunk.clear()

    for text in texts:
        chunk += [joint, text] if ids or chunk else [text]
        size += len(text)
        # Tokenising about a million characters at a time bounds the memory; it is never within a text.
        if size > 1 << 20:
            flush()
            size = 0
    if chunk:
        flush()
    flat = np.frombuffer(ids, dtype=np.int32) if ids else np.zeros(0, np.int32)
    if len(flat) < 2:
        raise InlayError("There is no text to learn from: every row is empty.")
    offsets = np.append(np.arange(0, len(flat), length), len(flat))
    if len(offsets) > 2 and offsets[-1] - offsets[-2] < 2:
        offsets = offsets[:-1]  # a block of one token predicts nothing
    blocks = Ragged(flat, offsets)
    mask = Ragged.ones(offsets)
    return Encoded({"input_ids": blocks, "attention_mask": mask}, labels=blocks)


def encode_prompts(prompts: Sequence[str], tokenizer: Any, max_length: int) -> Encoded:
    """Prompts that the model is to continue; of one that is too long the beginning is cut."""
    ids = [_prompt_ids(prompt, tokenizer) for prompt in prompts]
    cut = sum(len(each) > max_length for each in ids)
    kept = [each[-max_length:] for each in ids]
    return Encoded({"input_ids": kept, "attention_mask": [[1] * len(each) for each in kept]}, cut=cut)


def encode_answers(
    prompts: Sequence[str], answers: Sequence[str], tokenizer: Any, max_length: int, *, end: bool = True
) -> Encoded:
    """Prompts and what should follow; the loss is on the answer (and the end-of-text token after it) alone.

    One blank stands between the two, and is learnt with the answer, unless white space stands there already.

    What is too long loses the beginning of its prompt, and the end of its answer only when that alone is too long.
    """
    inputs, labels, cut = [], [], 0
    adds_blank = _adds_blank(tokenizer)
    for prompt, answer in zip(prompts, answers, strict=True):
        joint = "" if not prompt or prompt[-1].isspace() or answer[:1].isspace() else " "
        ahead = _prompt_ids(prompt, tokenizer)
        said = (joint + answer).removeprefix(" ") if adds_blank else joint + answer
        behind = list(tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"])
        behind += [end_of_text(tokenizer)] if end else []
        if len(ahead) + len(behind) > max_length:
            cut += 1
            behind = behind[: max_length - 1]
            ahead = ahead[max(0, len(ahead) + len(behind) - max_length) :]
        inputs.append(ahead + behind)
        labels.append([IGNORED] * len(ahead) + behind)
    masks = [[1] * len(each) for each in inputs]
    return Encoded({"input_ids": inputs, "attention_mask": masks}, labels=labels, cut=cut)


def with_targets(read: Encoded, targets: Sequence[str], tokenizer: Any, max_length: int) -> Encoded:
    """Encoded texts with what a decoder is to write of each as labels, the end-of-text token last; the model itself
    shifts them to what the decoder reads. A text that is too long loses its end."""
    cut, labels = 0, []
    for batch in _batches(targets):
        whole = tokenizer(text_target=batch, verbose=False)["input_ids"]
        for ids in whole:
            said = ids if ids and ids[-1] == end_of_text(tokenizer) else [*ids, end_of_text(tokenizer)]
            cut += len(said) > max_length
            labels.append(said if len(said) <= max_length else [*said[: max_length - 1], said[-1]])
    read.labels, read.targets_cut = labels, cut
    return read


def _adds_blank(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a blank before every text by itself, as those of SentencePiece do."""
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(ids) and tokenizer.convert_ids_to_tokens(ids)[0].startswith(_BLANKS)


def _prompt_ids(prompt: str, tokenizer: Any) -> list[int]:
    """The prompt's tokens with what the tokenizer puts before a text, and nothing of what it puts after one."""
    plain = list(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])
    whole = list(tokenizer(prompt, verbose=False)["input_ids"])
    before = next((i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain), 0)
    return whole[:before] + plain or [end_of_text(tokenizer)]


# -------------------------------------------------------------------------------------------------------- batches


class TextCollator:
    """A batch padded to its longest row: on the right to learn and predict, on the left to generate."""

    def __init__(self, tokenizer: Any, *, left: bool = False) -> None:
        if tokenizer.pad_token_id is None:
            raise InlayError(
                "The tokenizer has no padding token. `inlay.backbones.load` sets one; set `tokenizer.pad_token` "
                "(the end-of-text token will do) on one of your own."
            )
        self.left = left
        self.fill = {
            "input_ids": int(tokenizer.pad_token_id),
            "token_type_ids": int(getattr(tokenizer, "pad_token_type_id", 0) or 0),
            "labels": IGNORED,
        }

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {}
        for name in items[0]:
            values = [item[name] for item in items]
            if name == "labels" and isinstance(values[0], list) and isinstance(values[0][0], float):
                batch[name] = torch.tensor(values, dtype=torch.float32)  # a target for each output, and not for tokens
            elif isinstance(values[0], list):
                width = max(map(len, values))  # of labels, not always that of the texts
                fill = self.fill.get(name, 0)
                rows = [self._pad(value, [fill] * (width - len(value))) for value in values]
                batch[name] = torch.tensor(rows, dtype=torch.long)
            else:
                kind = torch.float32 if isinstance(values[0], float) else torch.long
                batch[name] = torch.tensor(values, dtype=kind)
        return batch

    def _pad(self, value: list[int], padding: list[int]) -> list[int]:
        return padding + value if self.left else value + padding
