"""Requests per second with 64 tasks: the service with Multi-LoRA, and with PEFT's LoRA and its `adapter_names`.

The same process, the same service, the same batches of at most 64 rows; only the adapted model differs. PEFT's adapters
are the same tasks, exported (`inlay export`), and must give the same answers. The clients are a process of their own
(serving_client.py): 256 connections that stay open, each with one request at a time, going round the tasks. `direct` is
without HTTP: batches of 64 rows, tokenised, run and decoded as the service does it; there the base model without
adapters says what the most is that can be had.

On a GPU: a BERT of the base size under bfloat16 autocast, 30 words a row. A batch of it is two or three milliseconds of
computing for an H200 and several times that of launching kernels for its host, so that the GPU is not what is waited
for. On a CPU: four layers of 128 channels, float32, 10 words, the smallest model that was tried and the one with the
largest gain; with `--channels 384 --words 30` there was next to none, since computing takes the time and not PEFT's
loop. Weights and texts are random. The contenders take turns; a figure is the median of the rounds, and what has been
measured is written after every round.

    python benchmarks/serving.py                       # prints the ratios, writes results/serving-<device>.json
    CUDA_VISIBLE_DEVICES= python benchmarks/serving.py --rounds 3
    python benchmarks/serving.py --cpu-time            # where others use the machine: `direct` by this process's time
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from inlay import Spec, backbones
from inlay.methods import registry
from inlay.records.versions import versions
from inlay.serve.hosting import ManyTasks, host
from inlay.serve.running import serving
from inlay.serve.settings import ServiceSettings
from inlay.tasks import TaskSchema
from inlay.training.joint import attach_tasks, save_tasks
from inlay.training.plan import pick_device
from inlay.workflow.export import export

RESULTS = Path(__file__).parent / "results"
SIZES = {
    "cuda": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "cpu": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512},
}
WORDS = {"cuda": 30, "cpu": 10}
PRECISION = {"cuda": "bfloat16", "cpu": "float32"}
clock = time.perf_counter
VOCABULARY, CLIENTS, BATCH, GOAL = 5000, 256, 64, 5.0
SPECIAL = {"pad_token": "w0", "unk_token": "w1", "cls_token": "w2", "sep_token": "w3"}


def write(place: Path, kind: str, tasks: int) -> Path:
    """A base model and an adapter folder of this many tasks."""
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=VOCABULARY, **SIZES[kind])).save_pretrained(place / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=512, **SPECIAL).save_pretrained(place / "model")
    schemas = {
        f"t{i}": TaskSchema(f"t{i}", "classification", ("text",), ("accuracy",), ("no", "yes"), max_length=512)
        for i in range(tasks)
    }
    backbone = backbones.load(str(place / "model"), kind="classification", num_labels=2, label_names=("no", "yes"))
    method = registry.get("multi-lora")
    adapted = attach_tasks(backbone, schemas, method, {"r": 8})
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.05)
    spec = Spec(model=str(place / "model"), method="multi-lora", tasks=tuple(schemas), precision=PRECISION[kind])
    save_tasks(adapted, schemas, method, backbone, spec, place / "adapter")
    return place / "adapter"


def theirs(folder: Path, place: Path) -> ManyTasks:
    """The same tasks as PEFT's LoRA adapters, run by PEFT."""
    hosted = ManyTasks(folder, model=None, only=["t0"], batch=BATCH)
    names = sorted((path.parent.name for path in folder.glob("*/adapter_config.json")), key=lambda name: int(name[1:]))
    hosted.tasks.schemas.update(dict.fromkeys(names, hosted.schemas["t0"]))
    base = hosted.tasks.model.unload()
    model: Any = None
    for name in names:
        saved = str(export(folder, name, place / "lora" / name))
        if model is None:
            model = PeftModel.from_pretrained(base, saved, adapter_name=name)
        else:
            model.load_adapter(saved, name)
    hosted.tasks.model = model.eval()
    return hosted


class Bare(torch.nn.Module):
    """The base model, which heeds no names of tasks."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, adapter_names: list[str], **batch: Any) -> Any:
        return self.model(**batch)


def bare(folder: Path) -> ManyTasks:
    """The same without adapters: every task is the base model with its own head."""
    hosted = ManyTasks(folder, model=None, only=["t0"], batch=BATCH)
    names = [path.parent.name for path in folder.glob("*/adapter_config.json")]
    hosted.tasks.schemas.update(dict.fromkeys(names, hosted.schemas["t0"]))
    hosted.tasks.model = Bare(hosted.tasks.model.unload()).eval()
    return hosted


def rows(count: int, tasks: int, kind: str, seed: int = 0) -> list[dict[str, str]]:
    """Requests that go round the tasks."""
    drawn = random.Random(seed)
    texts = [" ".join(f"w{drawn.randrange(4, VOCABULARY)}" for _ in range(WORDS[kind])) for _ in range(count)]
    return [{"task": f"t{i % tasks}", "text": text} for i, text in enumerate(texts)]


def direct(hosted: ManyTasks, given: list[dict[str, str]]) -> float:
    """Rows a second without HTTP."""
    requests = [hosted.tasks.request(each) for each in given]
    begin = clock()
    for start in range(0, len(requests), BATCH):
        hosted.answer(requests[start : start + BATCH])
    return len(requests) / (clock() - begin)


def over_http(address: str, given: list[dict[str, str]]) -> dict[str, float]:
    """Requests a second and times to an answer, as clients in another process find them."""
    command = [sys.executable, str(Path(__file__).with_name("serving_client.py")), address, str(CLIENTS)]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def compare(kind: str, tasks: int, rounds: int, requests: int) -> Iterator[dict[str, Any]]:
    """Both, in turns; what was found so far after every round."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = write(place, kind, tasks)
        contenders = {"multi-lora": host(folder, batch=BATCH), "peft-lora": theirs(folder, place)}
        _check_same(contenders, rows(BATCH, tasks, kind))
        without = bare(folder)
        gc.freeze()  # as `inlay serve` does: what was loaded stays
        settings = ServiceSettings(port=0, max_batch=BATCH, max_queue=4 * CLIENTS, timeout=600)
        found: dict[str, Any] = {each: {"direct": [], "http": []} for each in contenders} | {"base": {"direct": []}}
        for hosted in (*contenders.values(), without):  # to warm up
            direct(hosted, rows(2 * BATCH, tasks, kind))  # type: ignore[arg-type]
        for turn in range(1, rounds + 1):
            for each, hosted in contenders.items():
                count = requests if each == "multi-lora" or kind == "cpu" else 2 * CLIENTS
                given = rows(count, tasks, kind, turn)
                speed = direct(hosted, given)  # type: ignore[arg-type]
                with serving(hosted, settings) as address:
                    http = over_http(address, given)
                found[each]["direct"].append(speed)
                found[each]["http"].append(http)
                print(f"{each:<12} direct {speed:8.1f} /s   http {http['requests_per_second']:8.1f} /s", flush=True)
            speed = direct(without, rows(requests, tasks, kind, turn))
            found["base"]["direct"].append(speed)
            print(f"{'base':<12} direct {speed:8.1f} /s", flush=True)
            yield found


def typical(found: dict[str, Any], each: str, how: str) -> float:
    """The median of the rounds."""
    return statistics.median(entry if how == "direct" else entry["requests_per_second"] for entry in found[each][how])


def _check_same(contenders: dict[str, Any], given: list[dict[str, str]]) -> None:
    mine, its = (hosted.answer([hosted.tasks.request(each) for each in given]) for hosted in contenders.values())
    apart = max(abs(a["score"] - b["score"]) for a, b in zip(mine, its, strict=True) if a["label"] == b["label"])
    disagree = sum(a["label"] != b["label"] for a, b in zip(mine, its, strict=True))
    print(f"the same answers: scores within {apart:.1e}, {disagree} of {len(given)} labels differ")
    if apart > 0.05 or disagree > len(given) // 10:  # bfloat16 rounds, and half of the scores are near a half
        raise SystemExit("the two models do not say the same")


def main() -> None:
    global clock
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, help="of a round")
    parser.add_argument("--channels", type=int, help="another width of the model, a multiple of 32")
    parser.add_argument("--words", type=int, help="another length of the texts")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--cpu-time", action="store_true", help="count the process's own time, without HTTP")
    args = parser.parse_args()
    if args.cpu_time:
        clock = time.process_time
    warnings.filterwarnings("ignore", category=UserWarning)
    kind = pick_device().type
    if args.channels:
        sizes = {"hidden_size": args.channels, "intermediate_size": 4 * args.channels}
        SIZES[kind] |= sizes | {"num_attention_heads": args.channels // 32}
    WORDS[kind] = args.words or WORDS[kind]
    requests = args.requests or (2048 if kind == "cuda" else 1024)
    about = {
        "command": " ".join(["python", "benchmarks/serving.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if kind == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "model": SIZES[kind],
        "tasks": args.tasks,
        "clients": CLIENTS,
        "max_batch": BATCH,
        "words": WORDS[kind],
        "goal": GOAL,
        "clock": "cpu" if args.cpu_time else "wall",
        "versions": versions(),
    }
    args.results.mkdir(parents=True, exist_ok=True)
    target = args.results / f"serving-{kind}.json"
    for found in compare(kind, args.tasks, args.rounds, requests):
        ratios = {
            how: typical(found, "multi-lora", how) / typical(found, "peft-lora", how) for how in ("direct", "http")
        }
        target.write_text(json.dumps(about | {"ratios": ratios} | found, indent=1) + "\n")
    most = typical(found, "base", "direct")
    print(f"of what the base model alone answers: {typical(found, 'multi-lora', 'direct') / most:.2f}; ", end="")
    print(f"PEFT's loop {typical(found, 'peft-lora', 'direct') / most:.2f}")
    for how, ratio in ratios.items():
        verdict = "met" if ratio >= GOAL else "MISSED"
        print(
            f"{args.tasks} tasks, Multi-LoRA / PEFT's adapter_names, {how}: {ratio:.2f} x  goal >= {GOAL:g}  {verdict}"
        )
    print(f"written to {target.name}")


if __name__ == "__main__":
    main()
