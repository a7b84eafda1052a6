"""How much of a prompt a small adapter keeps: its benefit, its facts, the model's words; beside truncation and PEFT.

Prompts of about --tokens tokens: `e2e` and `gsm8k`, an instruction with worked examples; `document`, paragraphs of
wikitext2; `rules`, a short system prompt of a help desk, written here. Into the last two, facts are planted: names with
numbers drawn from the seed (needles). `long` is a document four times as long, for `matched in chunks`: read in pieces
of --tokens, each behind what those before it became.

What is scored, against the full prompt (1) and none (0):

- `benefit`: the share of the gain in log-likelihood, `(L(none) - L(x)) / (L(none) - L(full))`, on real texts that
  nothing was fitted to: further examples; of the planted facts, questions with their answers.
- `recall`: how many needles a greedy answer has, of those that the full prompt answers right.
- `agreement`: how many of the 16 tokens that the full prompt writes greedily after a text's beginning come out the same
  up to the first that differs.

Contenders: `compact-prefix` by matching alone and with distillation, `ntk-attention`, PEFT's CARTRIDGE (keys and values
from the prompt's first tokens, the same texts, steps and rate), the prompt's last tokens, and a summary of so many
tokens that the model itself writes, greedily. All are fitted to the model's own continuations of the prompt; `matched
on mixed texts` to those, pieces of the prompt, and self-made questions. Seeds draw the texts that are fitted to, the
places and numbers of the needles, and the order of training.

    python benchmarks/compress.py --data-dir <folder>                        # on a GPU: everything, three seeds
    python benchmarks/compress.py --data-dir <folder> --prompts e2e --sizes 32,128 --steps 0 --seeds 1

Every result is kept in results/compress-<device>.json as soon as it is there; those in the file are not made again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from commands import command as called_by
from peft import CartridgeConfig, get_peft_model, initialize_kv_prefix_from_past_key_values

from inlay import backbones
from inlay.methods import attach
from inlay.methods.prompts import read
from inlay.papers.ntk_attention.compression import examples, make_prompt
from inlay.records.versions import versions
from inlay.training import distil
from inlay.training.batches import Placement
from inlay.training.chunks import chunks_of, read_in_chunks
from inlay.training.plan import pick_device, pick_dtype
from inlay.workflow import study
from inlay.workflow.compress import share, split

RESULTS = Path(__file__).parent / "results"
MATCHED, DISTILLED, NTK, CARTRIDGE = "matched", "distilled", "ntk-attention", "PEFT CARTRIDGE"
LAST, SUMMARY, IN_CHUNKS = "last tokens", "own summary", "matched in chunks"
MIXED = "matched on mixed texts"
LONGER = 4
FULL, NONE = "full prompt", "no prompt"
LENGTH, REAL, NEEDLES, WRITTEN = 64, 32, 12, 16
ASK = "\n\nA short summary of the text above:\n"
RULES = (
    "You answer for the help desk of a library.",
    "Greet nobody by name, and never promise that a book will be back on a certain day.",
    "A loan lasts four weeks and is renewed twice, unless somebody else has reserved the book.",
    "Write short sentences. Give the opening hours only when you are asked for them.",
    "Fines are never waived by the help desk: send such questions to the office on the second floor.",
    "Children under twelve borrow with a card of a parent. Students show their card once a year.",
    "Recordings and maps are not lent. They may be copied in the reading room, up to ten pages a day.",
    "When you do not know an answer, say so, and name the desk that does.",
)
PEOPLE = (
    *("Adler", "Bodmer", "Calder", "Dunmore", "Eskola", "Farrow", "Gantz", "Hollis"),
    *("Imhof", "Jarvis", "Keller", "Lindqvist", "Moreau", "Nyberg", "Orlov"),
)


@dataclass(frozen=True)
class Example:
    """A prompt, texts of its kind, and questions about it with their answers."""

    name: str
    ids: list[int]
    lead: list[int]
    real: list[list[int]]
    needles: list[tuple[str, str]]


# ---- prompts


def few_shot(kind: str, folder: Path, tokenizer: Any, tokens: int, seed: int) -> tuple[str, list[str], list[Any]]:
    return make_prompt(kind, folder, tokenizer, tokens), examples(kind, folder, "test")[:REAL], []


def with_needles(kind: str, folder: Path, tokenizer: Any, tokens: int, seed: int) -> tuple[str, list[str], list[Any]]:
    """Sentences in their order, and between them facts at places of their own."""
    chance = random.Random(seed)
    people = chance.sample(PEOPLE, NEEDLES)
    numbers = chance.sample(range(100, 999), NEEDLES)
    facts = [f"The locker of {who} has the number {number}.\n" for who, number in zip(people, numbers, strict=True)]
    room = tokens - sum(len(tokenizer(fact).input_ids) for fact in facts)
    lines: list[str] = []
    for line in _lines(kind, folder):
        room -= len(tokenizer(line).input_ids)
        if room < 0:
            break
        lines.append(line)
    for number, fact in enumerate(facts):
        lines.insert(round((number + chance.random()) / len(facts) * len(lines)), fact)
    asked = [
        (f"\nQuestion: What number has the locker of {who}?\nAnswer: The locker of {who} has the number", f" {number}")
        for who, number in zip(people, numbers, strict=True)
    ]
    return "".join(lines), [question + answer + "." for question, answer in asked], asked


def _lines(kind: str, folder: Path) -> Iterator[str]:
    if kind == "rules":
        yield from (f"{number}. {rule}\n" for number, rule in enumerate(RULES, 1))
        return
    with gzip.open(folder / "wikitext2" / "test.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            text = " ".join(str(value) for value in json.loads(line).values()).strip()
            if len(text) > 80:
                yield text + "\n"


PROMPTS: dict[str, Callable[..., tuple[str, list[str], list[Any]]]] = {
    "e2e": few_shot,
    "gsm8k": few_shot,
    "document": with_needles,
    "rules": with_needles,
    "long": with_needles,
}


def example_of(name: str, folder: Path, tokenizer: Any, tokens: int, seed: int) -> Example:
    length = LONGER * tokens if name == "long" else tokens
    text, real, needles = PROMPTS[name](name, folder, tokenizer, length, seed)
    lead, ids = split(tokenizer, text)
    rows = [tokenizer(each, add_special_tokens=False).input_ids[: 2 * LENGTH] for each in real]
    return Example(name, ids, lead, rows, needles)


# ---- scores


@torch.no_grad()
def answers(pair: Any, tokenizer: Any, asked: list[str], length: int, prompted: bool, adapter: bool) -> list[list[int]]:
    found = []
    for text in asked:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids], device=pair.place.device)
        found.append(pair.go_on(ids, length, prompted=prompted, adapter=adapter)[0].tolist())
    return found


class Yardstick:
    """What the full prompt does, and none; what others do is put beside."""

    def __init__(self, pair: Any, tokenizer: Any, example: Example) -> None:
        self.tokenizer, self.example = tokenizer, example
        self.reference = {
            FULL: distil.scores(pair, example.real, pair.prompted),
            NONE: distil.scores(pair, example.real, lambda ids: pair.bare(ids, adapter=False)),
        }
        self.begun = [tokenizer.decode(row[:12]) for row in example.real[:8]]
        self.written = answers(pair, tokenizer, self.begun, WRITTEN, True, False)
        self.right = [self._hit(ids, answer) for ids, answer in self._asked(pair, True, False)]
        self.none = self._rates(
            self._asked(pair, False, False), answers(pair, tokenizer, self.begun, WRITTEN, False, False)
        )

    def _asked(self, pair: Any, prompted: bool, adapter: bool) -> list[tuple[list[int], str]]:
        found = answers(pair, self.tokenizer, [question for question, _ in self.example.needles], 4, prompted, adapter)
        return [(ids, answer) for ids, (_, answer) in zip(found, self.example.needles, strict=True)]

    def _hit(self, ids: list[int], answer: str) -> bool:
        return self.tokenizer.decode(ids).strip().startswith(answer.strip())

    def _rates(self, asked: list[tuple[list[int], str]], written: list[list[int]]) -> dict[str, float | None]:
        hits = [self._hit(ids, answer) for (ids, answer), right in zip(asked, self.right, strict=True) if right]
        alike = [_alike(a, b) for a, b in zip(written, self.written, strict=True)]
        return {"recall": statistics.mean(hits) if hits else None, "agreement": statistics.mean(alike) / WRITTEN}

    def of_prompted(self, pair: Any) -> dict[str, Any]:
        """Of a pair whose prompt is another."""
        found = distil.scores(pair, self.example.real, pair.prompted)
        written = answers(pair, self.tokenizer, self.begun, WRITTEN, True, False)
        return self._told(found, self._asked(pair, True, False), written)

    def of_adapter(self, pair: Any) -> dict[str, Any]:
        found = distil.scores(pair, self.example.real, pair.bare)
        written = answers(pair, self.tokenizer, self.begun, WRITTEN, False, True)
        return self._told(found, self._asked(pair, False, True), written)

    def _told(self, found: Any, asked: Any, written: Any) -> dict[str, Any]:
        # `share` of workflow.compress goes by its own names
        benefit = share({"full prompt": self.reference[FULL], "no prompt": self.reference[NONE], "x": found}, "x")
        return {"benefit": benefit, "nll": found.nll, **self._rates(asked, written)}


def _alike(found: list[int], right: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(found, right, strict=True)) if a != b), len(right))


# ---- contenders


@dataclass(frozen=True)
class Job:
    prompt: str
    seed: int
    size: int
    who: str

    @property
    def key(self) -> str:
        return f"{self.prompt}/{self.seed}/{self.size}/{self.who}"


def cartridge(model: Any, example: Example, size: int, place: Placement) -> Any:
    """PEFT's own, from the cache of the prompt's first tokens, its first token frozen."""
    cache = read(model, example.ids[:size]).cache  # PEFT's text begins behind it, at the position that follows
    for layer, keys in zip(cache.layers, _unmoved(model, example.ids[:size]), strict=True):
        layer.keys = keys
    adapted = get_peft_model(model, CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=size))
    initialize_kv_prefix_from_past_key_values(adapted, past_key_values=cache, num_virtual_tokens=size)
    return adapted.eval()


@torch.no_grad()
def _unmoved(model: Any, ids: list[int]) -> list[Any]:
    """Keys at positions 0, 1, ..., where PEFT has them."""
    device = next(model.parameters()).device
    cache = model(input_ids=torch.tensor([ids], device=device), use_cache=True).past_key_values
    return [layer.keys for layer in cache.layers]


def summary(backbone: Any, example: Example, size: int, args: Any) -> list[int]:
    """What the model says when it is asked for a summary, cut to so many tokens."""
    asked = backbone.processor(ASK, add_special_tokens=False).input_ids
    pair = distil.Pair(args.bare(), example.ids, args.place, example.lead)
    ids = torch.tensor([asked], device=args.place.device)
    written: list[int] = pair.go_on(ids, size, prompted=True, adapter=False)[0].tolist()
    pair.model.unload()
    return [*example.lead, *written]


def train(pair: Any, texts: list[list[int]], args: argparse.Namespace, seed: int, rate: float) -> None:
    learn = [row for number, row in enumerate(texts, 1) if number % 8]
    distil.distil(pair, learn, steps=args.steps, learning_rate=rate, seed=seed, check=texts[7::8])


def in_chunks(job: Job, model: Any, example: Example, stick: Yardstick, args: Any) -> dict[str, Any]:
    """Matching alone, of a prompt that is never read whole."""
    begin = time.perf_counter()
    settings: dict[str, Any] = {"start": "text", "seed": job.seed, "prompt_length": len(example.ids), "size": job.size}
    adapted = attach.attach(model, "compact-prefix", newly_initialised=[], task_kind="causal-lm", settings=settings)
    pieces = chunks_of(example.ids, args.tokens)

    def texts(pair: Any) -> list[list[int]]:
        found: list[list[int]] = pair.sample(args.texts, LENGTH, job.seed)
        return found

    pair = read_in_chunks(adapted.eval(), pieces, args.place, example.lead, LENGTH, texts)
    distil.fit(pair, texts(pair))
    found = {"seconds": time.perf_counter() - begin, "chunks": len(pieces)}
    found |= stick.of_adapter(pair)
    cast: Any = adapted
    cast.unload()
    return found


def measure(job: Job, backbone: Any, example: Example, stick: Yardstick, texts: Any, args: Any) -> Iterator[Any]:
    """What one contender keeps; matching alone comes before distillation."""
    model, place = backbone.model, args.place
    begin = time.perf_counter()
    if job.who in (LAST, SUMMARY):
        kept = example.ids[-job.size :] if job.who == LAST else summary(backbone, example, job.size, args)
        other = distil.Pair(args.bare(), kept, place, example.lead)
        yield job, stick.of_prompted(other) | {"seconds": time.perf_counter() - begin}
        other.model.unload()
        return
    if job.who == CARTRIDGE:
        adapted = cartridge(model, example, job.size, place)
        pair = distil.Pair(adapted, example.ids, place, example.lead)
        train(pair, texts, args, job.seed, args.rate)
        seconds = time.perf_counter() - begin
        yield job, stick.of_adapter(pair) | {"seconds": seconds, "parameters": adapted.num_parameters(True)}
        return
    if job.who == IN_CHUNKS:
        yield job, in_chunks(job, model, example, stick, args)
        return
    method = NTK if job.who == NTK else "compact-prefix"
    settings: dict[str, Any] = {"start": "text", "seed": job.seed, "prompt_ids": example.ids}
    settings |= (
        {"factored": False, "feature_map": "elu", "feature_multiplier": 2} if method == NTK else {"size": job.size}
    )
    adapted = attach.attach(model, method, newly_initialised=[], task_kind="causal-lm", settings=settings).eval()
    pair = distil.Pair(adapted, example.ids, place, example.lead)
    distil.fit(pair, texts)
    seconds = time.perf_counter() - begin
    parameters = sum(weight.numel() for weight in attach.trained_parameters(adapted).values())
    if method != NTK:
        yield (
            Job(job.prompt, job.seed, job.size, MIXED if job.who == MIXED else MATCHED),
            stick.of_adapter(pair)
            | {
                "seconds": seconds,
                "parameters": parameters,
            },
        )
    if args.steps and job.who not in (MATCHED, MIXED):
        train(pair, texts, args, job.seed, 3e-3 if method == NTK else args.rate)
        seconds = time.perf_counter() - begin
        yield job, stick.of_adapter(pair) | {"seconds": seconds, "parameters": parameters}
    adapted.unload()


# ---- running it


def table(results: dict[str, Any]) -> list[str]:
    """Prompt, contender and size by row, for a page; means over seeds."""
    rows: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for key, found in results.items():
        prompt, _, size, who = key.split("/")
        rows.setdefault((prompt, int(size), who), []).append(found)
    lines = ["| prompt | size | contender | benefit | recall | agreement | seconds | seeds |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for (prompt, size, who), found in sorted(rows.items()):
        benefits = [each["benefit"] for each in found if each["benefit"] is not None]
        recalls = [each["recall"] for each in found if each["recall"] is not None]
        spread = f" ± {statistics.stdev(benefits):.1%}" if len(benefits) > 1 else ""
        cells = [
            f"{statistics.mean(benefits):.1%}{spread}" if benefits else "-",
            f"{statistics.mean(recalls):.0%}" if recalls else "-",
            f"{statistics.mean(each['agreement'] for each in found):.0%}",
            f"{statistics.mean(each['seconds'] for each in found):.0f}",
            str(len(found)),
        ]
        lines.append(f"| {prompt} | {size or '-'} | {who} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded:smollm2")
    parser.add_argument("--data-dir", type=Path, required=True, help="a folder with e2e_nlg/, gsm8k/ and wikitext2/")
    parser.add_argument("--prompts", default="e2e,gsm8k,document,rules", help=f"of {', '.join(PROMPTS)}")
    parser.add_argument(
        "--contenders",
        default=",".join((DISTILLED, CARTRIDGE, LAST, SUMMARY, NTK)),
        help=f"also {MATCHED}, without distillation; {MIXED}; {IN_CHUNKS}",
    )
    parser.add_argument("--sizes", default="16,32,64,128,256,512")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--texts", type=int, default=320)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60, help="nothing is begun later than this")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = pick_device()
    args.place = Placement(device, pick_dtype(args.precision, device), args.batch_size)
    end = time.monotonic() + 60 * args.minutes
    backbone = backbones.load(args.model, kind="causal-lm")
    backbone.model.to(device)
    tokenizer = backbone.processor

    def bare() -> Any:
        settings = {"size": 1}
        found: Any = attach.attach(
            backbone.model, "compact-prefix", newly_initialised=[], task_kind="causal-lm", settings=settings
        )
        return found.eval()

    args.bare = bare
    target = args.results / f"compress-{device.type}.json"
    kept = json.loads(target.read_text()) if target.is_file() else {"results": {}, "yardsticks": {}}
    about = {
        "command": called_by().replace(str(args.data_dir), "<folder>"),
        "versions": versions(),
        "model": args.model,
    }
    for prompt in args.prompts.split(","):
        for seed in range(args.seeds):
            jobs = [
                Job(prompt, seed, 0 if who == NTK else size, who)
                for who in args.contenders.split(",")
                for size in ([0] if who == NTK else [int(size) for size in args.sizes.split(",")])
            ]
            jobs = [job for job in jobs if job.key not in kept["results"]]
            if not jobs or time.monotonic() > end:
                continue
            jobs_of = {job.who for job in jobs}
            example = example_of(prompt, args.data_dir, tokenizer, args.tokens, seed)
            first = bare()
            pair = distil.Pair(first, example.ids, args.place, example.lead)
            texts = pair.sample(args.texts, LENGTH, seed)
            mixed = study.texts_for(pair, tokenizer, "mixed", args.texts, LENGTH, seed) if MIXED in jobs_of else []
            stick = Yardstick(pair, tokenizer, example)
            first.unload()
            kept["yardsticks"][f"{prompt}/{seed}"] = {
                "tokens": len(example.ids),
                "nll": {who: found.nll for who, found in stick.reference.items()},
                "recall": statistics.mean(stick.right) if stick.right else None,
                NONE: stick.none,
            }
            print(f"{prompt}, seed {seed}: {kept['yardsticks'][f'{prompt}/{seed}']}", flush=True)
            for job in jobs:
                if time.monotonic() > end or job.size >= len(example.ids):
                    continue
                given = mixed if job.who == MIXED else texts
                for done, found in measure(job, backbone, example, stick, given, args):
                    kept["results"][done.key] = found | about
                    told = {name: value for name, value in found.items() if name != "nll"}
                    print(f"  {done.key}: {told}", flush=True)
                    args.results.mkdir(parents=True, exist_ok=True)
                    target.write_text(json.dumps(kept, indent=1) + "\n")
    print(*table(kept["results"]), sep="\n")


if __name__ == "__main__":
    main()
