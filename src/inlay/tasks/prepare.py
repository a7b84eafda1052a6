"""From a row as a data set has it to the normalised row of its kind. A row may become several, or none.

Span classification: `text` with the spans marked in place, `span` the marked words, and `start`, `end`: the range of
characters, marks included, that truncation must keep. Data to text: `source` in one line, `references` all texts for
it. The label stays under the name it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from inlay.errors import InlayError
from inlay.tasks.cells import as_text, as_whole_number, as_words

Row = dict[str, Any]
Prepare = Callable[[Mapping[str, Any]], Iterable[Row]]
Role = Literal["mark", "inside", "between"]

OPEN, CLOSE = "[", "]"
_ENTITY = re.compile(r"</?e[12]>")


def pieces(stretch: str) -> list[tuple[Role, str]]:
    """A marked stretch of text, in order: its marks, what stands inside of them, and the words between two entities."""
    if stretch.startswith(OPEN) and stretch.endswith(CLOSE):
        return [("mark", OPEN), ("inside", stretch[len(OPEN) : -len(CLOSE)]), ("mark", CLOSE)]
    found: list[tuple[Role, str]] = []
    at = depth = 0
    for mark in _ENTITY.finditer(stretch):
        found += [("inside" if depth else "between", stretch[at : mark.start()]), ("mark", mark.group())]
        depth += -1 if mark.group().startswith("</") else 1
        at = mark.end()
    return [*found, ("between" if found else "inside", stretch[at:])]


def mark_words(tokens: list[str], start: int, end: int) -> Row:
    """The text of `tokens` with the words `start` to `end` (exclusive) in marks."""
    if not 0 <= start < end <= len(tokens):
        raise InlayError(f"A span from word {start} to {end} does not lie in a text of {len(tokens)} words.")
    span = " ".join(tokens[start:end])
    before = " ".join(tokens[:start])
    marked = f"{OPEN} {span} {CLOSE}"
    first = len(before) + 1 if before else 0
    text = " ".join(part for part in (before, marked, " ".join(tokens[end:])) if part)
    return {"text": text, "span": span, "start": first, "end": first + len(marked)}


def mark_characters(text: str, start: int, end: int) -> Row:
    """`text` with the characters `start` to `end` (exclusive) in marks."""
    if not 0 <= start < end <= len(text):
        raise InlayError(f"A span from character {start} to {end} does not lie in a text of {len(text)} characters.")
    span = text[start:end]
    marked = f"{OPEN} {span} {CLOSE}"
    return {
        "text": text[:start] + marked + text[end:],
        "span": span,
        "start": start,
        "end": start + len(marked),
    }


def spans(row: Mapping[str, Any]) -> Iterable[Row]:
    """Entity typing: a given span (of words or of characters), or every entity of a tagged sentence."""
    if "start" in row and "end" in row:
        start, end = as_whole_number(row["start"], "start"), as_whole_number(row["end"], "end")
        rest = {key: value for key, value in row.items() if key not in ("tokens", "text", "start", "end")}
        if row.get("tokens") is not None:
            yield rest | mark_words(as_words(row["tokens"], "tokens"), start, end)
        elif row.get("text") is not None:
            yield rest | mark_characters(as_text(row["text"], "text"), start, end)
        else:
            raise InlayError("There is neither a text nor tokens.")
    else:
        tokens = as_words(row["tokens"], "tokens")
        for kind, start, end in entities(row["ner_tags"]):
            yield mark_words(tokens, start, end) | {"type": kind}


def marked_entities(row: Mapping[str, Any]) -> Iterable[Row]:
    """Relation classification: <e1>...</e1> and <e2>...</e2> stand in the sentence already."""
    text = as_text(row["sentence"], "sentence").strip()
    marks = list(_ENTITY.finditer(text))
    if len(marks) != 4:
        raise InlayError(f"A sentence should mark two entities, <e1>...</e1> and <e2>...</e2>, and does not: {text!r}")
    rest = {key: value for key, value in row.items() if key != "sentence"}
    yield rest | {"text": text, "start": marks[0].start(), "end": marks[-1].end()}


def wsc(row: Mapping[str, Any]) -> Iterable[Row]:
    """Winograd schemas: the pronoun is marked, for it may occur more than once."""
    words = as_text(row["text"], "text").split(" ")
    said = as_whole_number(row["span2_index"], "span2_index")
    pronoun = as_text(row["span2_text"], "span2_text")
    length = len(pronoun.split(" "))
    # The index is off by a word in a few rows of the release.
    found = [i for i in range(len(words)) if " ".join(words[i : i + length]).lower().startswith(pronoun.lower())]
    at = min(found, key=lambda i: abs(i - said), default=said)
    marked = [*words[:at], OPEN, *words[at : at + length], CLOSE, *words[at + length :]]
    rest = {key: value for key, value in row.items() if not key.endswith("_index")}
    yield rest | {
        "text": " ".join(marked),
        "span1_text": as_text(row["span1_text"], "span1_text"),
        "span2_text": pronoun,
    }


def e2e(row: Mapping[str, Any]) -> Iterable[Row]:
    """E2E: `name[Blue Spice], area[city centre]` is read as `name : Blue Spice | area : city centre`."""
    pairs = re.findall(r"\s*([^\[\],]+)\[([^\]]*)\]", as_text(row["meaning_representation"], "meaning_representation"))
    made: Row = {"source": " | ".join(f"{key} : {value}" for key, value in pairs)}
    if row.get("human_reference") is not None:
        made["references"] = [as_text(row["human_reference"], "human_reference")]
    yield made


def triples(row: Mapping[str, Any]) -> Iterable[Row]:
    """WebNLG and DART, in the layout of a data folder or of the hub: `subject : predicate : object | ...`."""
    if "triples" in row:
        found, texts = row["triples"], row.get("texts")
    elif "tripleset" in row:
        found, texts = row["tripleset"], row["annotations"]["text"]
    else:
        sets = row["modified_triple_sets"]["mtriple_set"]
        found = [triple.split(" | ") for triple in sets[0]]
        good = zip(row["lex"]["text"], row["lex"]["comment"], strict=True)
        texts = [text for text, comment in good if comment == "good"]
    source = " | ".join(" : ".join(part.replace("_", " ").strip('"') for part in _parts(triple)) for triple in found)
    if texts is None:
        yield {"source": source}
    elif texts:
        yield {"source": source, "references": [as_text(text, "texts") for text in texts]}


def _parts(triple: Any) -> list[str]:
    if not isinstance(triple, list | tuple):
        raise InlayError(f"'triples' is a list of lists [subject, predicate, object], and holds {str(triple)[:40]!r}.")
    return as_words(triple, "triples")


Entity = tuple[str, int, int]


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities (type, first word, word after the last) that a sequence of BIO tags names.

    As in the CoNLL scorer, an I- that continues nothing of its type begins an entity.
    """
    found: list[Entity] = []
    open_type, start = None, 0
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if open_type is not None and not (prefix == "I" and kind == open_type):
            found.append((open_type, start, i))
            open_type = None
        if prefix in ("B", "I") and open_type is None:
            open_type, start = kind, i
    return found


PREPARE: Mapping[str, Prepare] = {
    "spans": spans,
    "marked-entities": marked_entities,
    "wsc": wsc,
    "e2e": e2e,
    "triples": triples,
}

# The columns a row must have to be prepared for a prediction, one of these sets.
INPUTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "spans": (("tokens", "start", "end"), ("text", "start", "end")),
    "marked-entities": (("sentence",),),
    "wsc": (("text", "span1_text", "span2_text", "span2_index"),),
    "e2e": (("meaning_representation",),),
    "triples": (("triples",),),
}
