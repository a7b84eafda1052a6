"""Whether every method compiles whole: torch.compile(model, fullgraph=True) on tiny models, forward and training step.

Every registered method on every family asked for that capabilities.json says it works on (the tiny models of
tests/zoo.py): the logits in eval mode, then loss and gradients in training mode, compared with the same model as it
is, float32. One graph break is an error. A case that compiles wrongly is a mismatch.

    python benchmarks/compile_sweep.py                                       # CPU, aot_eager, about ten minutes
    python benchmarks/compile_sweep.py --device cuda --backend inductor --workers 8
    python benchmarks/compile_sweep.py --methods bias,ssf --families bert,vit

Prints a table method x family and the reason of every failure; written to results/compile-<device>-<backend>.json
after every case. Ends with 1 where one of our own methods fails; PEFT's own are only reported.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from commands import command as called_by

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "matrix")]
RESULTS = Path(__file__).parent / "results"
FAMILIES = ("bert", "llama", "vit", "resnet")
BACKENDS = ("eager", "aot_eager", "inductor")
MODES = ("forward", "training")
OK = "ok"


def cases(methods: list[str], families: list[str]) -> list[tuple[str, str, str]]:
    """Method, family and the task to try it for: generation for a decoder where it works, else the first that does."""
    from inlay.methods.capabilities import capabilities

    found = []
    for method in methods:
        for family in families:
            tasks = capabilities()["methods"].get(method, {}).get(family, [])
            if tasks:
                found.append((method, family, "causal-lm" if "causal-lm" in tasks else tasks[0]))
    return found


def try_case(method: str, family: str, task: str, backend: str, device: str) -> dict[str, Any]:
    """What becomes of one case in either mode."""
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    begin = time.perf_counter()
    found: dict[str, Any] = {"method": method, "family": family, "task": task}
    for mode in MODES:
        try:
            found[mode] = _compare(method, family, task, mode, backend, device)
        except Exception as failure:
            found[mode] = reason(failure)
    return found | {"seconds": round(time.perf_counter() - begin, 1)}


def _try(job: tuple[str, str, str, str, str]) -> dict[str, Any]:
    return try_case(*job)


def _compare(method: str, family: str, task: str, mode: str, backend: str, device: str) -> str:
    import torch

    torch._dynamo.reset()
    torch.backends.cudnn.allow_tf32 = False  # or convolutions of one model differ by 1e-4 from one kernel to the next
    if backend == "inductor":
        torch._inductor.config.fallback_random = True  # the same dropout
    ours, batch = _adapted(method, family, task, device)
    theirs = copy.deepcopy(ours)
    compiled = torch.compile(theirs, fullgraph=True, backend=backend)
    for model in (ours, theirs):
        model.train(mode == "training")
    wanted, found = _run(ours, ours, batch, mode), _run(compiled, theirs, batch, mode)
    worst = _worst(found, wanted)
    if worst is None:
        return OK
    if mode == "forward":
        return f"mismatch: {worst}"
    # Other random numbers are no mistake.
    for model in (ours, theirs):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0
    torch._dynamo.reset()
    again = _worst(_run(compiled, theirs, batch, mode), _run(ours, ours, batch, mode))
    return f"mismatch: {worst}" if again else f"{OK} (dropout draws other numbers)"


def _adapted(method: str, family: str, task: str, device: str) -> tuple[Any, dict[str, Any]]:
    """The tiny model with the method in it, moved away from its start."""
    import torch
    from properties import stir

    from inlay.methods.attach import attach
    from zoo import tiny

    model, batch = tiny(family, task)  # type: ignore[arg-type]
    torch.manual_seed(0)
    adapted = attach(model, method)
    stir(adapted, seed=1)
    return adapted.to(device), {name: value.to(device) for name, value in batch.items()}


def _run(called: Any, model: Any, batch: dict[str, Any], mode: str) -> dict[str, Any]:
    import torch

    from inlay.methods.attach import trained_parameters

    torch.manual_seed(0)
    if mode == "forward":
        with torch.no_grad():
            return {"logits": called(**{name: value for name, value in batch.items() if name != "labels"}).logits}
    model.zero_grad()
    out = called(**batch)
    out.loss.backward()
    found = {name: p.grad.clone() for name, p in trained_parameters(model).items() if p.grad is not None}
    return found | {"loss": out.loss.detach()}


def _worst(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Where two results differ most; None: nowhere."""
    import torch

    if found.keys() != wanted.keys():
        return f"gradients of {sorted(found.keys() ^ wanted.keys())[:3]}"
    for name, value in wanted.items():
        try:
            torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-3)
        except AssertionError as difference:
            return f"{name}: {' '.join(str(difference).split())[:160]}"
    return None


def reason(failure: Exception) -> str:
    """What dynamo said first, and where in the code it was."""
    text = str(failure).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [repr(failure)]
    told = [lines[0], *(line for line in lines[1:] if line.startswith(("Explanation:", "Developer debug context:")))]
    _, _, user = text.partition("from user code")
    places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', user or text)
    at = ""
    if places:
        shown = [(Path(file).parts[-3:], line, name) for file, line, name in places[-2:]]
        at = " at " + " > ".join(f"{'/'.join(file)}:{line} {name}" for file, line, name in shown)
    return f"{type(failure).__name__}: {' | '.join(told)[:400]}{at}"


def table(found: list[dict[str, Any]], families: list[str]) -> list[str]:
    """Method x family: forward and training."""
    width = max(len(entry["method"]) for entry in found) + 2
    lines = [" " * width + "".join(f"{family:<22}" for family in families)]
    by_place = {(entry["method"], entry["family"]): entry for entry in found}
    for method in dict.fromkeys(entry["method"] for entry in found):
        cells = []
        for family in families:
            entry = by_place.get((method, family))
            cells.append("-" if entry is None else " / ".join(_word(entry[mode]) for mode in MODES))
        lines.append(f"{method:<{width}}" + "".join(f"{cell:<22}" for cell in cells))
    return lines


def _word(outcome: str) -> str:
    if outcome.startswith(OK):
        return OK
    return "MISMATCH" if outcome.startswith("mismatch") else "BREAK"


def main() -> int:
    from inlay.methods.registry import all_methods
    from inlay.records.versions import versions

    registered = all_methods()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="aot_eager", choices=BACKENDS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--methods", help="some, separated by commas; all registered otherwise")
    parser.add_argument("--families", default=",".join(FAMILIES), help="of tests/zoo.py, separated by commas")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    methods = args.methods.split(",") if args.methods else list(registered)
    families = args.families.split(",")
    unknown = set(methods) - registered.keys()
    if unknown:
        parser.error(f"no method {', '.join(sorted(unknown))}; there are {', '.join(registered)}")
    command = called_by()
    about = {"command": command, "backend": args.backend, "device": args.device, "versions": versions()}
    begin = time.perf_counter()
    found: list[dict[str, Any]] = []
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # A worker for a few cases: what compilers keep grows with every one.
    jobs = [(*case, args.backend, args.device) for case in cases(methods, families)]
    order = {(method, family): i for i, (method, family, _) in enumerate(cases(methods, families))}
    args.results.mkdir(parents=True, exist_ok=True)
    target = args.results / f"compile-{args.device}-{args.backend}.json"
    with multiprocessing.get_context("spawn").Pool(args.workers, maxtasksperchild=12) as pool:
        for entry in pool.imap_unordered(_try, jobs):
            found.append(entry)
            print(f"{entry['method']} on {entry['family']}, {entry['task']} ({entry['seconds']:.0f} s)", end=": ")
            print("; ".join(f"{mode} {entry[mode]}" for mode in MODES), flush=True)
            found.sort(key=lambda entry: order[entry["method"], entry["family"]])
            target.write_text(json.dumps({**about, "of": len(jobs), "cases": found}, indent=1) + "\n")
    print(*table(found, families), sep="\n")
    failed = [e for e in found if not all(e[mode].startswith(OK) for mode in MODES)]
    own = [e for e in failed if registered[e["method"]].tuner is not None]
    works = f"{len(found) - len(failed)} of {len(found)} cases compile whole; of our methods {len(own)} fail"
    print(f"{works}. {time.perf_counter() - begin:.0f} s, written to {target}")
    return 1 if own else 0


if __name__ == "__main__":
    sys.exit(main())
