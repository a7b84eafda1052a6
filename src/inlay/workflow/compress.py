"""Compress a prompt into an NTK-Attention adapter of fixed size (Liang et al. 2024, section G): `inlay compress`.

In closed form, Eq. (4) on the prompt's keys and values; then, unless that is all that was asked for, by distillation:
the model without the prompt learns to match the model with it on texts that may follow the prompt. It begins at a
least-squares fit, which needs no gradients (`methods/ntk_attention/fit.py`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError, first_line, misspelt, unknown
from inlay.records.atomic import write_folder, write_json
from inlay.records.spec import PRECISIONS
from inlay.workflow.progress import Stage

if TYPE_CHECKING:
    from inlay.methods.prompts import Prompt
    from inlay.training.distil import Pair, Scores

METHOD = "ntk-attention"
REPORT = "compress.json"
PROMPTED, NOTHING, CLOSED = "full prompt", "no prompt", "closed form"
FITTED, DISTILLED = "least squares", "distilled"
CHECKED = 8  # every eighth of the others chooses when training was at its best
LEAST = {"steps": ("--steps", 0), "batch_size": ("--batch-size", 1), "texts": ("--count", 2), "length": ("--length", 2)}
SHOWN, BEGUN, WRITTEN = 3, 8, 32  # held-out texts to go on with, their tokens that are given, tokens to write
HELD_OUT = 5  # every fifth text is kept apart, to be scored and never trained on


@dataclass(frozen=True)
class Options:
    """How a prompt is distilled; docs/compress.md says what the defaults reach.

    `texts` are drawn from the prompted model, `length` tokens each, unless the user's own are given. No `steps` leaves
    the least-squares fit. A step changes a head by the learning rate, relative to its size.
    """

    steps: int = 300
    learning_rate: float = 3e-3
    batch_size: int = 8
    texts: int = 320
    length: int = 64
    seed: int = 0
    precision: str = "auto"

    def __post_init__(self) -> None:
        for name, (option, least) in LEAST.items():
            if getattr(self, name) < least:
                raise InlayError(
                    f"{name}={getattr(self, name)} ({option}) must be at least {least}; {getattr(Options, name)} is "
                    "usual."
                )
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InlayError(
                f"learning_rate={self.learning_rate:g} must be greater than 0; {Options.learning_rate:g} is usual."
            )


@dataclass(frozen=True)
class Generation:
    """The beginning of a held-out text, and the likeliest way to go on: with the prompt, the adapter, neither."""

    beginning: str
    prompted: str
    adapter: str
    bare: str


@dataclass(frozen=True)
class Compression:
    """What came out: scores of held-out texts by who expects them, and what the adapter costs.

    `generations` are how the model goes on with the beginnings of held-out texts; they may hold parts of the prompt,
    and are not written into the folder.
    """

    folder: Path
    scores: dict[str, Scores]
    prompt_tokens: int
    trained: int
    saved_bytes: int
    record: dict[str, Any]
    generations: list[Generation] = field(default_factory=list)

    def recovered(self, who: str) -> float | None:
        """The share of the prompt's benefit that is there without it; None if the prompt has none."""
        return share(self.scores, who)

    @property
    def helped(self) -> bool:
        """Whether distillation, if there was any, left the adapter elsewhere than where it began."""
        began = self.scores.get(FITTED, self.scores[CLOSED])
        return self.scores.get(DISTILLED) != began


def share(scores: Mapping[str, Scores], who: str) -> float | None:
    """`(L(no prompt) - L(who)) / (L(no prompt) - L(full prompt))` of the mean negative log-likelihoods."""
    benefit = scores[NOTHING].nll - scores[PROMPTED].nll
    return None if benefit <= 0 else (scores[NOTHING].nll - scores[who].nll) / benefit


def compress(
    model: str,
    prompt: Path | str | None,
    out: Path | str,
    *,
    prefix_adapter: Path | str | None = None,
    distil: bool = True,
    texts: Path | Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    options: Options | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
    say: Callable[[str], None] | None = None,
) -> Compression:
    """Make an adapter in `out` that stands for the prompt: a `Path` to a file with it, or the text itself.

    `texts` are continuations of the prompt, or a file of them (one a line; .jsonl: the field `text`); by default the
    prompted model writes its own. `settings` are those of `NTKAttentionConfig`. Nothing is written until all is done.
    In place of a prompt, `prefix_adapter` is the folder of an adapter that PEFT's prefix tuning trained; texts are then
    needed, as a prefix has no words to go on from.
    """
    options = options or Options()
    out = Path(out)
    _check_out(out)
    if (prompt is None) == (prefix_adapter is None):
        raise InlayError("Give a prompt or a prefix_adapter (--prompt, --prefix-adapter), one of the two.")
    if prefix_adapter is not None and texts is None:
        raise InlayError(
            "A trained prefix has no words to go on from: give texts (--texts) like those it was trained on."
        )
    text = prompt if prompt is None or isinstance(prompt, str) else _read(prompt, "prompt")
    given = None if texts is None else _texts(texts)
    from inlay import backbones
    from inlay.methods import attach
    from inlay.methods.card import About
    from inlay.methods.prompts import check
    from inlay.records.versions import versions
    from inlay.tasks import kinds
    from inlay.training.distil import Pair
    from inlay.training.place import Place
    from inlay.training.plan import pick_device, pick_dtype

    begin = time.perf_counter()
    backbone = backbones.load(model, kind=kinds.CAUSAL_LM, revision=revision, trust_remote_code=trust_remote_code)
    if backbone.newly_initialised:
        raise InlayError(
            f"{model!r} came without {', '.join(backbone.newly_initialised)}: it is no trained language model, and has "
            "nothing to say behind a prompt. Take a causal language model, such as embedded:smollm2."
        )
    device = pick_device()
    place = Place(device, pick_dtype(options.precision, device), options.batch_size)
    backbone.model.to(device)
    chosen = _settings(backbone.model, settings or {}) | {"seed": options.seed}
    put = partial(attach.attach, backbone.model, METHOD, newly_initialised=[], task_kind=kinds.CAUSAL_LM)
    tell = say or (lambda line: None)
    tell(f"model: {backbone.source}")
    adapted: Any
    if text is not None:
        lead, ids = split(backbone.processor, text)
        check(backbone.model, ids, more=options.length)
        tell(f"reading a prompt of {len(ids):,} tokens")
        adapted = put(settings=chosen | {"prompt_ids": ids}).eval()
        pair = Pair(adapted, ids, place, lead)
    else:
        prefix = _prefix(backbone.model, Path(str(prefix_adapter)))
        check(backbone.model, [0] * prefix.length, more=options.length)
        adapted = put(settings=chosen | {"prompt_length": prefix.length}).eval()
        adapted.base_model.start_from(prefix)
        pair = Pair(adapted, prefix, place)
    if given is None:
        rows = _drawn(pair, options, progress)
    else:
        rows = _encoded(backbone.processor, given, options.length, whole=text is None)
    train, held = parted(rows)
    tell(f"scoring {len(held):,} held-out texts; {len(train):,} to learn from")
    scores = _before(pair, held)
    losses = _distilled(pair, train, held, scores, options, progress) if distil else []
    record = {
        "model": backbone.address,
        "prompt_tokens": pair.prompt.length,
        "texts": {"source": "own" if given is None else "given", "train": len(train), "held_out": len(held)},
        "options": asdict(options),
        "distilled": distil,
        "scores": {
            who: asdict(found) | {"perplexity": found.perplexity, "recovered": share(scores, who)}
            for who, found in scores.items()
        },
        "losses": losses,
        "seconds": round(time.perf_counter() - begin, 1),
        "versions": versions(),
    }

    def fill(folder: Path) -> None:
        attach.save(
            adapted,
            METHOD,
            folder,
            base_model_name=backbone.address,
            fingerprint=backbone.fingerprint,
            about=About.of(backbone, facts=_facts(record)),
        )
        write_json(folder / REPORT, record)

    write_folder(out, fill)
    weights = attach.trained_parameters(adapted).values()
    saved = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    trained = sum(weight.numel() for weight in weights)
    shown = _generations(pair, backbone.processor, held, options.length)
    return Compression(out, scores, pair.prompt.length, trained, saved, record, shown)


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    """What the adapter's card says of the prompt; not the prompt itself, which may be nobody else's business."""
    held_out = record["texts"]["held_out"]
    who, found = list(record["scores"].items())[-1]
    kept = found["recovered"]
    told = f"{kept:.0%} of what the prompt gains in log-likelihood" if kept is not None else "the prompt gains nothing"
    return {
        "stands for": f"a prompt of {record['prompt_tokens']:,} tokens",
        "result": f"{who}: perplexity {found['perplexity']:.4g}, {told}, on {held_out:,} held-out texts, seed "
        f"{record['options']['seed']}",
        "what may be lost": "names, numbers and other details of the prompt",
    }


def _settings(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the adapter: many features and all ranks, unless told otherwise; it is one prompt, not a sweep."""
    from inlay.anatomy import anatomy

    fixed = {"prompt_ids", "prompt_length", "prefix_length", "seed"} & given.keys()
    if fixed or given.get("start", "text") != "text":
        raise InlayError(f"{', '.join(sorted(fixed)) or 'start'}: compress sets this itself. Leave it out.")
    usual: dict[str, Any] = {"feature_map": "elu"}
    if "taylor_order" in given and given.get("feature_map") != "taylor":
        raise InlayError(
            f"taylor_order={given['taylor_order']!r} says nothing to features other than 'taylor'. Leave it out, or "
            "give feature_map='taylor' too (--set feature_map=taylor)."
        )
    attention = next((block.attention for block in anatomy(model).blocks if block.attention is not None), None)
    if attention is not None:  # otherwise attaching says what is wrong with the model
        usual["rank"] = attention.head_size
    if given.get("feature_map", "elu") != "taylor":
        usual["feature_multiplier"] = 2
    return usual | dict(given) | {"start": "text"}


def _before(pair: Pair, held: list[list[int]]) -> dict[str, Scores]:
    """What the held-out texts are worth before anything is trained."""
    from inlay.training.distil import scores

    return {
        PROMPTED: scores(pair, held, pair.prompted),
        NOTHING: scores(pair, held, lambda ids: pair.bare(ids, adapter=False)),
        CLOSED: scores(pair, held, pair.bare),
    }


def _distilled(
    pair: Pair,
    train: list[list[int]],
    held: list[list[int]],
    scores: dict[str, Scores],
    options: Options,
    progress: bool,
) -> list[float]:
    """Fit, where the features allow it, and train; the held-out texts' scores go into `scores`."""
    from inlay.training import distil

    if distil.can_fit(pair):
        batches = 2 * math.ceil(len(train) / options.batch_size)
        with Stage(batches, "fitting", "batches", show=progress) as stage:
            distil.fit(pair, train, stage.advance)
        scores[FITTED] = distil.scores(pair, held, pair.bare)
    if not options.steps:
        return []
    check = train[CHECKED - 1 :: CHECKED]  # to choose the best state by; the held-out texts choose nothing
    learn = [row for number, row in enumerate(train, 1) if number % CHECKED]
    with Stage(options.steps, "distilling", "steps", show=progress) as stage:
        losses = distil.distil(
            pair,
            learn,
            steps=options.steps,
            learning_rate=options.learning_rate,
            seed=options.seed,
            check=check,
            # Of one batch; the divergence in the table is of held-out texts.
            tick=lambda loss: stage.advance(note=f", training loss {loss:.3f}"),
        )
    scores[DISTILLED] = distil.scores(pair, held, pair.bare)
    return losses


def _drawn(pair: Pair, options: Options, progress: bool) -> list[list[int]]:
    with Stage(options.texts * options.length, "sampling", "tokens", show=progress) as stage:
        return pair.sample(options.texts, options.length, options.seed, stage.advance)


def _generations(pair: Pair, tokenizer: Any, held: Sequence[Sequence[int]], room: int) -> list[Generation]:
    """How the first held-out texts go on. A beginning is at most half of its text; with what is written it has `room`
    tokens, for which the context suffices."""
    import torch

    def read(ids: torch.Tensor) -> str:
        row = ids[0].tolist()
        end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
        return str(tokenizer.decode(row[:end], skip_special_tokens=True)).strip()

    shown = []
    for text in held[:SHOWN]:
        begun = torch.tensor([list(text[: max(1, min(BEGUN, len(text) // 2))])], device=pair.place.device)
        more = min(WRITTEN, room - begun.shape[1])
        shown.append(
            Generation(
                read(begun),
                read(pair.go_on(begun, more, prompted=True)),
                read(pair.go_on(begun, more, prompted=False)),
                read(pair.go_on(begun, more, prompted=False, adapter=False)),
            )
        )
    return shown


def split(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before every text, and the prompt's ids with it; what it puts behind is left out."""
    # Not verbose: Transformers would warn of a prompt beyond the context, which `check` refuses.
    inner = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if not inner:
        raise InlayError("The prompt is empty: there is nothing to compress. Give a text of one token or more.")
    whole = tokenizer(text, verbose=False).input_ids
    extra = len(whole) - len(inner)
    at = next((at for at in range(extra + 1) if whole[at : at + len(inner)] == inner), 0)
    return whole[:at], whole[:at] + inner


def _encoded(tokenizer: Any, texts: Sequence[str], length: int, *, whole: bool) -> list[list[int]]:
    """The ids of given texts, at most `length` of each; a single token has nothing to be predicted from. Behind a
    prompt a text has no token of beginning; behind a trained prefix it is `whole`."""
    rows = [tokenizer(text, add_special_tokens=whole).input_ids[:length] for text in texts]
    return [row for row in rows if len(row) > 1]


def parted(rows: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Texts to train on, and every fifth (or the last of a few) held out."""
    if len(rows) < 2:
        raise InlayError(
            f"{len(rows)} texts of two tokens or more: at least 2 are needed, one to learn from and one held out."
        )
    held = rows[HELD_OUT - 1 :: HELD_OUT] or rows[-1:]
    train = [row for number, row in enumerate(rows, 1) if number % HELD_OUT] if len(rows) >= HELD_OUT else rows[:-1]
    return train, held


def _prefix(model: Any, folder: Path) -> Prompt:
    """The prefix that PEFT's prefix tuning left in a folder."""
    from peft import PeftConfig, PeftModel, PeftType

    from inlay.methods.prompts import trained_prefix

    try:
        config = PeftConfig.from_pretrained(str(folder))
        if config.peft_type != PeftType.PREFIX_TUNING:
            raise InlayError(f"{str(folder)!r} holds an adapter of type {config.peft_type.value}, not PREFIX_TUNING.")
        return trained_prefix(PeftModel.from_pretrained(model, str(folder)))
    except InlayError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InlayError(
            f"The prefix in {str(folder)!r} cannot be loaded into this model: {first_line(error)}"
        ) from error


def _texts(source: Path | Sequence[str]) -> list[str]:
    """Continuations of the prompt, from a list or a file."""
    if not isinstance(source, Path):
        return [source] if isinstance(source, str) else list(source)
    lines = [line for line in _read(source, "texts").splitlines() if line.strip()]
    if source.suffix != ".jsonl":
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise InlayError(
                f"{source}, line {number}: each line must be a JSON object with a field `text`."
            ) from error
        if not isinstance(found[-1], str):
            raise InlayError(f"{source}, line {number}: the field `text` is {found[-1]!r}, and must be a text.")
    return found


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InlayError(f"The {what} file {str(path)!r} is not text in UTF-8. Convert it first.") from error
    except OSError as error:
        raise InlayError(
            f"The {what} file {str(path)!r} cannot be read: {error.strerror or error}.{misspelt(path)}"
        ) from error


def _check_out(out: Path) -> None:
    """Before any work: the folder must be new or empty, and its parent one that can be written to."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InlayError(f"{str(out)!r} exists and is not empty: nothing is overwritten. Choose another --out.")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not os.access(parent, os.W_OK) or not parent.is_dir():
        raise InlayError(f"No permission to write in {str(parent)!r}. Choose another --out.")
