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

Contenders: `compact-prefix` by matching alone and with distillation, the other targets of `inlay compress`
(`cartridge`, `ntk-attention`, `lora`), PEFT's CARTRIDGE (keys and values from the prompt's first tokens, the same
texts, steps and rate), the prompt's last tokens, and a summary of so many tokens that the model itself writes,
greedily. All are fitted to the model's own continuations of the prompt; what is called `on mixed texts` to those,
pieces of the prompt, and self-made questions. Seeds draw the texts that are fitted to, the
places and numbers of the needles, and the order of training.

    python benchmarks/compress.py --data-dir <folder> --processes 12         # on a GPU: everything, three seeds
    python benchmarks/compress.py --data-dir <folder> --prompts e2e --sizes 32,128 --steps 0 --seeds 1

Every result is kept in results/compress-<device>.json as soon as it is there; those in the file are not made again.
With --processes, prompts and seeds are measured beside one another, and seconds are not times to quote: each result
says how many processes there were.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import subprocess
import sys
import tempfile
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
from inlay.workflow.compress import Options, share, split

RESULTS = Path(__file__).parent / "results"
MATCHED, DISTILLED, NTK, CARTRIDGE = "matched", "distilled", "ntk-attention", "PEFT CARTRIDGE"
LAST, SUMMARY, IN_CHUNKS = "last tokens", "own summary", "matched in chunks"
MIXED, DISTILLED_MIXED = "matched on mixed texts", "distilled on mixed texts"
CARTRIDGE_MIXED = "PEFT CARTRIDGE on mixed texts"
ON_MIXED = (MIXED, DISTILLED_MIXED, CARTRIDGE_MIXED)
OWN_CARTRIDGE, LORA = "cartridge", "lora"
SIZELESS = (NTK, LORA)
DEFAULT = (DISTILLED_MIXED, CARTRIDGE_MIXED, LAST, SUMMARY, DISTILLED, CARTRIDGE, NTK, LORA, OWN_CARTRIDGE)
TARGETS = {DISTILLED: "compact-prefix", DISTILLED_MIXED: "compact-prefix"}
"""Of `inlay compress`; the others are called as their contenders are."""
RATE = 1e-2
"""Of PEFT's CARTRIDGE: the rate of compact-prefix."""
ALIKE = 12
"""Tokens of a text's beginning that are continued."""
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
    """Greedy continuations, those of equal length together: nothing is padded."""
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in asked]
    found: dict[int, list[int]] = {}
    for size in {len(row) for row in ids}:
        rows = [number for number, row in enumerate(ids) if len(row) == size]
        given = torch.tensor([ids[number] for number in rows], device=pair.place.device)
        made = pair.go_on(given, length, prompted=prompted, adapter=adapter).tolist()
        found |= dict(zip(rows, made, strict=True))
    return [found[number] for number in range(len(ids))]


class Yardstick:
    """What the full prompt does, and none; what others do is put beside."""

    def __init__(self, pair: Any, tokenizer: Any, example: Example) -> None:
        self.tokenizer, self.example = tokenizer, example
        self.reference = {
            FULL: distil.scores(pair, example.real, pair.prompted),
            NONE: distil.scores(pair, example.real, lambda ids: pair.bare(ids, adapter=False)),
        }
        self.begun = [tokenizer.decode(row[:ALIKE]) for row in example.real]
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
    """What the model says when it is asked for a summary, greedily: a shorter one is the beginning of a longer."""
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


def instead(job: Job, backbone: Any, example: Example, stick: Yardstick, args: Any) -> dict[str, Any]:
    """Another prompt, of fewer tokens, in place of the whole."""
    begin = time.perf_counter()
    kept = example.ids[-job.size :] if job.who == LAST else args.summaries[: len(example.lead) + job.size]
    other = distil.Pair(args.bare(), kept, args.place, example.lead)
    seconds, size = time.perf_counter() - begin, 2 * _values(backbone, job.size)
    found = stick.of_prompted(other) | {"seconds": seconds, "bytes": size}
    other.model.unload()
    return found


def _values(backbone: Any, tokens: int) -> int:
    """Keys and values of so many tokens."""
    config = backbone.model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * tokens * config.num_hidden_layers * config.num_key_value_heads * size)


def measure(job: Job, backbone: Any, example: Example, stick: Yardstick, texts: Any, args: Any) -> Iterator[Any]:
    """What one contender keeps; matching alone comes before distillation."""
    begin = time.perf_counter()

    def told(pair: Any, parameters: int) -> dict[str, Any]:
        seconds = time.perf_counter() - begin
        return stick.of_adapter(pair) | {"seconds": seconds, "parameters": parameters, "bytes": 2 * parameters}

    if job.who in (LAST, SUMMARY):
        yield job, instead(job, backbone, example, stick, args)
    elif job.who in (CARTRIDGE, CARTRIDGE_MIXED):
        adapted = cartridge(backbone.model, example, job.size, args.place)
        pair = distil.Pair(adapted, example.ids, args.place, example.lead)
        train(pair, texts, args, job.seed, RATE)
        yield job, told(pair, sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad))
    elif job.who == IN_CHUNKS:
        yield job, in_chunks(job, backbone.model, example, stick, args)
    else:
        matched = {MATCHED: DISTILLED, MIXED: DISTILLED_MIXED}
        becomes = matched.get(job.who, job.who)
        sized = {} if job.who in SIZELESS else {"size": job.size}
        options = Options(to=TARGETS.get(becomes, becomes), seed=job.seed, **sized)
        method = options.target.method
        settings = options.for_model(backbone.model, len(example.ids))
        settings |= {"prompt_ids": example.ids} if method.takes("prompt_ids") else {}
        adapted = attach.attach(backbone.model, method, newly_initialised=[], task_kind="causal-lm", settings=settings)
        pair = distil.Pair(adapted.eval(), example.ids, args.place, example.lead)
        parameters = sum(weight.numel() for weight in attach.trained_parameters(adapted).values())
        if distil.can_fit(pair):
            distil.fit(pair, texts)
            back = {after: before for before, after in matched.items()}
            who = job.who if job.who in matched else back.get(job.who, f"{job.who}, matched")
            yield Job(job.prompt, job.seed, job.size, who), told(pair, parameters)
        if args.steps and job.who not in matched:
            train(pair, texts, args, job.seed, options.rate)
            yield job, told(pair, parameters)
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


def jobs_of(prompt: str, seed: int, args: argparse.Namespace, kept: dict[str, Any]) -> list[Job]:
    """What is to be measured of one prompt and seed, and is not there yet."""
    found = [
        Job(prompt, seed, 0 if who in SIZELESS else size, who)
        for who in args.contenders.split(",")
        for size in ([0] if who in SIZELESS else [int(size) for size in args.sizes.split(",")])
    ]
    return [job for job in found if job.key not in kept["results"]]


def measure_all(prompt: str, seed: int, jobs: list[Job], backbone: Any, args: Any, keep: Callable[..., None]) -> None:
    """All jobs of one prompt and seed; each result is kept when it is there."""
    tokenizer, wanted = backbone.processor, {job.who for job in jobs}
    example = example_of(prompt, args.data_dir, tokenizer, args.tokens, seed)
    first = args.bare()
    pair = distil.Pair(first, example.ids, args.place, example.lead)
    plain = wanted - {*ON_MIXED, LAST, SUMMARY, IN_CHUNKS}
    texts = pair.sample(args.texts, LENGTH, seed) if plain else []
    mixed = []
    if wanted & set(ON_MIXED):
        mixed = study.texts_for(pair, tokenizer, "mixed", args.texts, LENGTH, seed)
    stick = Yardstick(pair, tokenizer, example)
    first.unload()
    if SUMMARY in wanted:
        args.summaries = summary(backbone, example, max(job.size for job in jobs if job.who == SUMMARY), args)
    keep(
        "yardsticks",
        f"{prompt}/{seed}",
        {
            "tokens": len(example.ids),
            "bytes": 2 * _values(backbone, len(example.ids)),
            "nll": {who: found.nll for who, found in stick.reference.items()},
            "recall": statistics.mean(stick.right) if stick.right else None,
            NONE: stick.none,
        },
    )
    for job in jobs:
        if time.monotonic() > args.end or job.size >= len(example.ids):
            continue
        given = mixed if job.who in ON_MIXED else texts
        for done, found in measure(job, backbone, example, stick, given, args):
            keep("results", done.key, found)


def beside_one_another(groups: list[tuple[str, int]], args: argparse.Namespace, merge: Callable[[Path], None]) -> None:
    """One process for each prompt and seed, at most --processes at once; each writes a file of its own."""
    waiting, running = list(groups), []
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < args.processes:
                prompt, seed = waiting.pop(0)
                own = Path(scratch) / f"{prompt}-{seed}"
                words = [*sys.argv[1:], "--prompts", prompt, "--first-seed", str(seed), "--seeds", "1"]
                minutes = str(max(0.0, (args.end - time.monotonic()) / 60))
                words += ["--results", str(own), "--minutes", minutes, "--processes", "1"]
                words += ["--at-once", str(min(len(groups), args.processes)), "--after", str(args.results)]
                running.append((own, subprocess.Popen([sys.executable, __file__, *words])))
            time.sleep(1)
            for own, process in list(running):
                merge(own)
                if process.poll() is not None:
                    running.remove((own, process))


def main() -> None:
    args = arguments()
    args.end = time.monotonic() + 60 * args.minutes
    device = pick_device()
    target = args.results / f"compress-{device.type}.json"
    kept = read_kept(target)
    about = {
        "command": called_by().replace(str(args.data_dir), "<folder>"),
        "versions": versions(),
        "model": args.model,
        "precision": str(pick_dtype(args.precision, device) or torch.float32).removeprefix("torch."),
        "at_once": args.at_once,
    }

    def write() -> None:
        args.results.mkdir(parents=True, exist_ok=True)
        scratch = target.with_suffix(".new")
        scratch.write_text(json.dumps(kept, indent=1) + "\n")
        scratch.replace(target)

    def keep(part: str, key: str, found: dict[str, Any]) -> None:
        kept[part][key] = found | ({"run": told_once(kept["runs"], about)} if part == "results" else {})
        print(f"  {key}: { {name: value for name, value in found.items() if name != 'nll'} }", flush=True)
        write()

    def merge(folder: Path) -> None:
        new = read_kept(folder / target.name)
        if new["results"].keys() - kept["results"].keys():
            kept["yardsticks"] |= new["yardsticks"]
            for key, found in new["results"].items():
                kept["results"][key] = found | {"run": told_once(kept["runs"], new["runs"][found["run"]])}
            write()

    before = kept if args.after is None else read_kept(args.after / target.name)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    groups = [(prompt, seed) for seed in seeds for prompt in args.prompts.split(",")]
    groups = [group for group in groups if jobs_of(*group, args, before)]
    if args.processes > 1:
        beside_one_another(groups, args, merge)
    elif groups:
        args.place = Placement(device, pick_dtype(args.precision, device), args.batch_size)
        backbone = backbones.load(args.model, kind="causal-lm")
        backbone.model.to(device)

        def bare() -> Any:
            one: dict[str, Any] = {"newly_initialised": [], "task_kind": "causal-lm", "settings": {"size": 1}}
            return attach.attach(backbone.model, "compact-prefix", **one).eval()

        args.bare = bare
        for group in groups:
            if time.monotonic() < args.end:
                measure_all(*group, jobs_of(*group, args, before), backbone, args, keep)
    if args.after is None:
        print(*table(kept["results"]), sep="\n")


ABOUT = ("command", "versions", "model", "precision", "at_once")
"""What results of one run have in common."""


def read_kept(path: Path) -> dict[str, Any]:
    """The results of a file; in older ones each result says by itself which run it is of."""
    found: dict[str, Any] = {"results": {}, "yardsticks": {}, "runs": {}}
    found |= json.loads(path.read_text()) if path.is_file() else {}
    for result in found["results"].values():
        about = {name: result.pop(name) for name in ABOUT if name in result}
        if about:
            result["run"] = told_once(found["runs"], about)
    return found


def told_once(runs: dict[str, Any], about: dict[str, Any]) -> str:
    """The name of the run that this is about."""
    for name, known in runs.items():
        if known == about:
            return name
    name = str(len(runs))
    runs[name] = about
    return name


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded:smollm2")
    parser.add_argument("--data-dir", type=Path, required=True, help="a folder with e2e_nlg/, gsm8k/ and wikitext2/")
    parser.add_argument("--prompts", default="e2e,gsm8k,document,rules", help=f"of {', '.join(PROMPTS)}")
    parser.add_argument(
        "--contenders",
        default=",".join(
            (DISTILLED_MIXED, CARTRIDGE_MIXED, LAST, SUMMARY, DISTILLED, CARTRIDGE, NTK, LORA, OWN_CARTRIDGE)
        ),
        help=f"also {MATCHED} and {MIXED}, without distillation; {IN_CHUNKS}",
    )
    parser.add_argument("--sizes", default="128,32,256,64,512,16")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--texts", type=int, default=320)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="nothing is begun later than this")
    parser.add_argument("--precision", default="auto", help="as of `inlay compress`: bfloat16 on a GPU that has it")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--at-once", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--after", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
