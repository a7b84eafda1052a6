"""Compress a prompt into an adapter: `inlay compress`.

First in closed form, from the prompt's keys and values. Then, unless only that was asked for, by a fit that needs no
gradients, and by distillation: the model without the prompt learns to match the model with it, on texts that may follow
the prompt. What the prompt becomes is a `Target`; its method (`Method.compresses_prompts`) provides closed form and fit
through `TunerHooks`. One that does not, such as PEFT's LoRA, is distilled alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError, first_line, misspelt
from inlay.methods import registry
from inlay.records.atomic import write_folder, write_json
from inlay.records.versions import versions
from inlay.workflow import study
from inlay.workflow.compress_options import LEAST_PART, SIZES, Options, Target, targets
from inlay.workflow.progress import Stage

__all__ = ["Compression", "Generation", "Options", "Target", "compress", "parted", "share", "split", "targets"]

if TYPE_CHECKING:
    from peft import PeftModel

    from inlay.backbones.loading import Backbone
    from inlay.methods.prompts import Prompt
    from inlay.training.distil import Pair, Scores

REPORT = "compress.json"
PROMPTED, NOTHING, CLOSED = "full prompt", "no prompt", "closed form"
FITTED, DISTILLED = "least squares", "distilled"
CHECKED = 8  # every eighth training text selects the best state of the training
SHOWN, BEGUN, WRITTEN = 3, 8, 32  # held-out texts to continue, their tokens that are given, tokens to write
RECORDED = ("to", "chunk", "study", "steps", "learning_rate", "batch_size", "texts", "length", "seed", "precision")
TWO_TOKENS = "Give a text of two tokens or more (--prompt)."
HELD_OUT = 5  # every fifth text is held out: it is scored and never trained on


@dataclass(frozen=True)
class Generation:
    """The beginning of a held-out text, and its likeliest continuation with the prompt, the adapter, and neither."""

    beginning: str
    prompted: str
    adapter: str
    bare: str


@dataclass(frozen=True)
class Compression:
    """What came out: the scores of the held-out texts by what the model sees, and the size of the adapter.

    `generations` are continuations of held-out texts. They may hold parts of the prompt, and are not written into the
    folder.
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
        """Whether distillation, if there was any, changed the adapter."""
        began = next(self.scores[who] for who in (FITTED, CLOSED, NOTHING) if who in self.scores)
        return self.scores.get(DISTILLED) != began

    @property
    def tokens(self) -> int | None:
        """The room it takes, in tokens of the prompt; None where it has no such size."""
        found: int | None = self.record.get("size")
        return found


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
    texts: Path | Sequence[str] | None = None,
    options: Options | None = None,
    progress: bool = True,
    say: Callable[[str], None] | None = None,
) -> Compression:
    """Make an adapter in `out` that replaces the prompt: a `Path` to a file with it, or the text itself.

    `texts` are continuations of the prompt, or a file of them (one a line; .jsonl: the field `text`); by default the
    prompted model writes its own. Nothing is written until all is done. In place of a prompt, `prefix_adapter` is the
    folder of an adapter that PEFT's prefix tuning trained; texts are then required, because a prefix has no words to
    continue from.
    """
    from inlay.methods.protocol import TunerHooks
    from inlay.training.distil import scores as score

    begin, options, out = time.perf_counter(), options or Options(), Path(out)
    _check_out(out)
    source = _source(prompt, prefix_adapter, texts)
    if options.target.method.tuner is None and not (options.distil and options.steps):
        raise InlayError(
            f"{options.target.name!r} has no closed form and no fit: without steps nothing of the prompt is in it. "
            "Give --steps, or another --to."
        )
    given = None if texts is None else _texts(texts)
    tell = say or (lambda line: None)
    backbone = _load(model, options)
    tell(f"model: {backbone.source}")
    fixed = None if given is None else _encoded(backbone.processor, given, options.length, tell, whole=prompt is None)
    if fixed is not None:
        parted(fixed)  # too few are said before the prompt is read

    def written(pair: Pair) -> list[list[int]]:
        """Texts behind a prompt: given, or the model's own."""
        if fixed is not None:
            return fixed
        with Stage(options.texts * options.length, "sampling", "tokens", show=progress) as stage:
            return study.texts_for(
                pair, backbone.processor, options.study, options.texts, options.length, options.seed, stage.advance
            )

    pair = _pair(backbone, source, options, written, tell)
    rows = written(pair)
    train, held = parted(rows)
    tell(f"scoring {len(held):,} held-out texts; {len(train):,} to learn from")
    scores = _references(pair, held)
    tried: dict[int, float | None] = {}
    if options.quality is not None:
        tried = _smallest(pair, train, options, progress, tell)
    if isinstance(pair.model.base_model, TunerHooks):
        scores[CLOSED] = score(pair, held, pair.bare)
    losses: list[float] = []
    if options.distil:
        losses = _made(pair, train, options, progress, lambda who: scores.update({who: score(pair, held, pair.bare)}))
    record = _record(pair, backbone, options, scores) | {
        "sizes_tried": {str(size): kept for size, kept in tried.items()},
        "texts": {
            "source": _study(pair, backbone.processor, options) if given is None else "given",
            "train": len(train),
            "held_out": len(held),
        },
        "losses": losses,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    shown = _generations(pair, backbone.processor, held, options.length)
    trained = _save(pair.model, options.target, backbone, record, out)
    saved = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return Compression(out, scores, pair.prompt.tokens, trained, saved, record, shown)


def _source(prompt: Path | str | None, prefix_adapter: Path | str | None, texts: object) -> str | Path:
    """The prompt's text, or the folder of a trained prefix."""
    if (prompt is None) == (prefix_adapter is None):
        raise InlayError("Give a prompt or a prefix_adapter (--prompt, --prefix-adapter), one of the two.")
    if prefix_adapter is not None and texts is None:
        raise InlayError(
            "A trained prefix has no words to continue from: give texts (--texts) like those it was trained on."
        )
    if prompt is None:
        return Path(str(prefix_adapter))
    found = prompt if isinstance(prompt, str) else _read(prompt, "prompt")
    if not found.strip():
        raise InlayError(f"The prompt is empty: there is nothing to compress. {TWO_TOKENS}")
    return found


def _study(pair: Pair, tokenizer: Any, options: Options) -> str:
    """The kind of texts that were written."""
    return study.settle(options.study, pair, tokenizer, options.texts, options.length, options.seed)


def _record(pair: Pair, backbone: Backbone, options: Options, scores: Mapping[str, Scores]) -> dict[str, Any]:
    """What `compress.json` says of the model, the settings and the result."""
    settings = {name: value for name, value in asdict(options).items() if name in RECORDED}
    return {
        "model": backbone.address,
        "prompt_tokens": pair.prompt.tokens,
        "in_chunks": pair.prompt.earlier is not None,
        "size": getattr(pair.model.active_peft_config, "size", None),
        "options": settings | {"to": options.target.name, "learning_rate": options.rate},
        "distilled": options.distil,
        "scores": {
            who: asdict(found) | {"perplexity": found.perplexity, "recovered": share(scores, who)}
            for who, found in scores.items()
        },
        "versions": versions(),
    }


def _load(model: str, options: Options) -> Backbone:
    from inlay import backbones
    from inlay.tasks import kinds

    backbone = backbones.load(
        model, kind=kinds.CAUSAL_LM, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    if backbone.newly_initialised:
        raise InlayError(
            f"{model!r} came without {', '.join(backbone.newly_initialised)}: it is no trained language model, and has "
            "nothing to say after a prompt. Take a causal language model, such as embedded:smollm2."
        )
    return backbone


def _pair(
    backbone: Backbone,
    source: str | Path,
    options: Options,
    texts: Callable[[Pair], list[list[int]]],
    tell: Callable[[str], None],
) -> Pair:
    """The model with the prompt, and with the adapter instead: `source` is the text, or a trained prefix's folder.
    `texts` are those behind a chunk of a prompt that is read in several."""
    from inlay.methods import attach
    from inlay.methods.prompts import check, context_of
    from inlay.tasks import kinds
    from inlay.training.batches import Placement
    from inlay.training.chunks import chunks_of, read_in_chunks, usual_chunk
    from inlay.training.distil import Pair
    from inlay.training.plan import pick_device, pick_dtype

    device = pick_device()
    place = Placement(device, pick_dtype(options.precision, device), options.batch_size)
    backbone.model.to(device)
    method = options.target.method
    put = partial(attach.attach, backbone.model, method, newly_initialised=[], task_kind=kinds.CAUSAL_LM)
    adapted: Any
    if isinstance(source, str):
        lead, ids = split(backbone.processor, source)
        if len(ids) - len(lead) < LEAST_PART:
            raise InlayError(f"The prompt has one token: nothing is shorter. {TWO_TOKENS}")
        most = options.chunk or usual_chunk(backbone.model, len(ids), options.length)
        context = context_of(backbone.model)
        if most is not None and context is not None and len(ids) + options.length > context:
            most = min(most, max(1, context - options.length))  # a larger one would not fit either
        if most is not None and most < len(ids) and (options.chunk or method.takes("size")):
            if not method.takes("size"):
                raise InlayError(
                    f"chunk={options.chunk} (--chunk): what --to {options.target.name} becomes has no place for parts "
                    "of a prompt. Leave --chunk or --to out."
                )
            settings = options.for_model(backbone.model, len(ids)) | {"prompt_length": len(ids)}
            adapted = put(settings=settings).eval()
            _try_to_write(adapted, options.target)
            parts = chunks_of(ids, most)
            tell(f"reading a prompt of {len(ids):,} tokens in {len(parts)} chunks")
            return read_in_chunks(adapted, parts, place, lead, options.length, texts, tell)
        check(backbone.model, ids, more=options.length)
        tell(f"reading a prompt of {len(ids):,} tokens")
        settings = options.for_model(backbone.model, len(ids))
        read = {"prompt_ids": ids} if method.takes("prompt_ids") else {}
        adapted = put(settings=settings | read).eval()
        _try_to_write(adapted, options.target)
        return Pair(adapted, ids, place, lead)
    prefix = _prefix(backbone.model, source)
    check(backbone.model, [0] * prefix.length, more=options.length)
    settings = options.for_model(backbone.model, prefix.length)
    known = {"prompt_length": prefix.length} if method.takes("prompt_length") else {}
    adapted = put(settings=settings | known).eval()
    if known:
        adapted.base_model.start_from(prefix)
    return Pair(adapted, prefix, place)


def _try_to_write(adapted: PeftModel, target: Target) -> None:
    """What cannot be written is said before the work."""
    if target.write is not None:
        with TemporaryDirectory() as folder:
            registry.load(target.write)(adapted, Path(folder), None)


def _save(adapted: PeftModel, target: Target, backbone: Backbone, record: Mapping[str, Any], out: Path) -> int:
    """Write the adapter and the record; how many parameters it has."""
    from inlay.methods import attach
    from inlay.methods.card import About

    def fill(folder: Path) -> None:
        if target.write is not None:
            registry.load(target.write)(adapted, folder, backbone.address)
        else:
            attach.save(
                adapted,
                target.method,
                folder,
                base_model_name=backbone.address,
                fingerprint=backbone.fingerprint,
                about=About.of(backbone, facts=_facts(record)),
            )
        write_json(folder / REPORT, record)

    write_folder(out, fill)
    return sum(weight.numel() for weight in attach.trained_parameters(adapted).values())


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    """What the adapter's card says of the prompt; not the prompt itself, which may be private."""
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


def _references(pair: Pair, texts: list[list[int]]) -> dict[str, Scores]:
    """What an adapter's scores are compared with."""
    from inlay.training.distil import scores

    return {
        PROMPTED: scores(pair, texts, pair.prompted),
        NOTHING: scores(pair, texts, lambda ids: pair.bare(ids, adapter=False)),
    }


def _made(
    pair: Pair, train: list[list[int]], options: Options, progress: bool, done: Callable[[str], object]
) -> list[float]:
    """Fit, where the method can, and train; `done` is called after each, with its name. The losses."""
    from inlay.training import distil

    check = train[CHECKED - 1 :: CHECKED]  # selects the best state; the held-out texts select nothing
    learn = [row for number, row in enumerate(train, 1) if number % CHECKED]
    if distil.can_fit(pair):
        with Stage(distil.fit_work(pair, learn), "fitting", "steps", show=progress) as stage:
            distil.fit(pair, learn, stage.advance)
        done(FITTED)
    if not options.steps:
        return []
    with Stage(options.steps, "distilling", "steps", show=progress) as stage:
        losses = distil.distil(
            pair,
            learn,
            steps=options.steps,
            learning_rate=options.rate,
            seed=options.seed,
            check=check,
            # Of one batch; the divergence in the table is of held-out texts.
            tick=lambda loss: stage.advance(note=f", training loss {loss:.3f}"),
        )
    done(DISTILLED)
    return losses


def _smallest(
    pair: Pair, train: list[list[int]], options: Options, progress: bool, tell: Callable[[str], None]
) -> dict[int, float | None]:
    """Give the adapter the smallest size that keeps the quality, by bisection; what each size tried has kept.

    The texts that select the best state select the size too; the held-out ones select nothing.
    """
    from inlay.training.distil import scores

    assert options.quality is not None
    check = train[CHECKED - 1 :: CHECKED]
    if not check:
        raise InlayError(
            f"{len(train)} texts to learn from are too few to find a size with: {CHECKED} are needed at least "
            "(--count, --texts). Or give --size."
        )
    references = _references(pair, check)
    config: Any = pair.model.active_peft_config
    hooks: Any = pair.model.base_model
    most = max(1, pair.prompt.tokens // LEAST_PART)
    sizes = [size for size in SIZES if size <= most] or [most]
    found: dict[int, float | None] = {}
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        config.size = sizes[middle]
        hooks.start_from(pair.prompt)
        if options.distil:
            _made(pair, train, options, progress, lambda who: None)
        kept = share(references | {DISTILLED: scores(pair, check, pair.bare)}, DISTILLED)
        found[sizes[middle]] = kept
        tell(f"size {sizes[middle]}: " + ("the prompt has no benefit to keep" if kept is None else f"keeps {kept:.1%}"))
        if kept is not None and kept >= options.quality:
            high = middle
        else:
            low = middle + 1
    if low == len(sizes):
        tell(f"No size up to {sizes[-1]} keeps {options.quality:.0%} of the benefit: {sizes[-1]} is taken.")
    config.size = sizes[min(low, len(sizes) - 1)]
    hooks.start_from(pair.prompt)
    return found


def _generations(pair: Pair, tokenizer: Any, held: Sequence[Sequence[int]], room: int) -> list[Generation]:
    """Continuations of the first held-out texts. A beginning is at most half of its text; with the continuation it has
    at most `room` tokens, which fit the context."""
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
    """The ids that the tokenizer puts before every text, and the prompt's ids with them; none are added at its end."""
    # Not verbose: Transformers would warn of a prompt beyond the context, which `check` refuses.
    inner = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if not inner:
        raise InlayError(f"The prompt is empty: there is nothing to compress. {TWO_TOKENS}")
    whole = tokenizer(text, verbose=False).input_ids
    extra = len(whole) - len(inner)
    at = next((at for at in range(extra + 1) if whole[at : at + len(inner)] == inner), 0)
    return whole[:at], whole[:at] + inner


def _encoded(
    tokenizer: Any, texts: Sequence[str], length: int, tell: Callable[[str], None], *, whole: bool
) -> list[list[int]]:
    """The ids of given texts, at most `length` of each; a text of one token has nothing to predict. After a prompt a
    text has no token of beginning; after a trained prefix it has (`whole`)."""
    rows = [tokenizer(text, add_special_tokens=whole, verbose=False).input_ids for text in texts]
    if longer := sum(len(row) > length for row in rows):
        tell(f"{longer:,} of {len(rows):,} texts are cut to {length} tokens (--length)")
    return [row[:length] for row in rows if len(row) > 1]


def parted(rows: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Texts to train on, and every fifth (or the last of a few) held out."""
    if len(rows) < 2:
        raise InlayError(
            f"{len(rows)} texts of two tokens or more: at least 2 are needed, one to learn from and one held out. Give "
            "more, one a line, or none: then the model writes its own (--texts, --count)."
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
