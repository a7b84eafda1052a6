"""Mixed tasks of Multi-LoRA on a GPU: the kernel against float64, whole models against each task alone, and times.

test_low_rank.py runs the checks. On a machine that has torch and a GPU but no pytest, with the times of RoBERTa-large:
`python tests/methods/multi_lora_cuda_checks.py`
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from low_rank_cases import BOUND, CASES, Product, check
from peft import get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

import inlay
from inlay.errors import InlayError
from inlay.methods import low_rank
from inlay.methods.mixture.rows import NAMES_KEPT

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
PRECISIONS = ("float32", "bfloat16", "float16", "autocast bfloat16", "autocast float16")
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {"no_grad": torch.no_grad, "inf": torch.inference_mode}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
ROWS, LENGTH = 64, 128


# -------------------------------------------------------------------------------------------------------------- models


def build(family: str = "roberta", size: dict[str, int] = SMALL, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        if family == "gpt2":
            config = GPT2Config(n_embd=128, n_layer=3, n_head=4, vocab_size=500, num_labels=3, pad_token_id=0, **ENDS)
            return GPT2ForSequenceClassification(config).to(dtype).eval()
        config = RobertaConfig(vocab_size=5000, max_position_embeddings=514, num_labels=3, **size)
        return RobertaForSequenceClassification(config).to(dtype).eval()


def adapted(base: nn.Module, tasks: int) -> Any:
    """With this many tasks, every third with a scale of its own, and all moved away from their start."""
    model: Any = None
    for i in range(tasks):
        alpha, heads = 16 + 8 * (i % 3 == 2), ["score" if hasattr(base, "score") else "classifier"]
        own = inlay.MultiLoraConfig(r=8, lora_alpha=alpha, modules_to_save=heads)
        if model is None:
            model = get_peft_model(base, own, adapter_name="t0")
        else:
            model.add_adapter(f"t{i}", own)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "inlay_multi_lora_b" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / 2)
    return model.eval()


@cache
def small(family: str, dtype: torch.dtype) -> Any:
    return adapted(build(family, dtype=dtype), 5)


def tokens(rows: int = 12, length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(5, 400, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def mixed(tasks: int, rows: int = 12) -> list[str]:
    return [f"t{i % tasks}" for i in range(rows)]


def precision(name: str) -> tuple[torch.dtype, AbstractContextManager[Any]]:
    """Of the weights, and the context of a pass."""
    dtype = getattr(torch, name.split()[-1])
    return (torch.float32, torch.autocast(DEVICE, dtype)) if "autocast" in name else (dtype, nullcontext())


class Kernels:
    """Counts calls of the kernel."""

    def __enter__(self) -> Kernels:
        self.calls, self.add = 0, low_rank.add_by_slot

        def counted(*given: Any) -> None:
            self.calls += 1
            self.add(*given)

        low_rank.add_by_slot = counted
        return self

    def __exit__(self, *error: object) -> None:
        low_rank.add_by_slot = self.add


# -------------------------------------------------------------------------------------------------------------- checks


def check_kernel(case: Product) -> None:
    """Twice: from the second call on the kernel is launched directly."""
    for _ in range(2):
        check(case, DEVICE)


def check_each_task_alone(family: str, name: str, mode: str) -> None:
    """Rows of five tasks, and some without one, in one pass: as each task's rows alone, which torch's products make."""
    dtype, context = precision(name)
    model, ids, bound = small(family, dtype), tokens(), 10 * BOUND[getattr(torch, name.split()[-1])]
    names = ["__base__" if i in (2, 7) else own for i, own in enumerate(mixed(5))]
    with MODES[mode](), context, Kernels() as kernels:
        found = model(input_ids=ids, adapter_names=names).logits.double()
        assert kernels.calls == len(model.base_model.routing.layers)
        for task in dict.fromkeys(names):
            own = [i for i, each in enumerate(names) if each == task]
            alone = model(input_ids=ids[own], adapter_names=[task] * len(own)).logits.double()
            error = float((found[own] - alone).abs().max() / alone.abs().mean())
            assert error <= bound, (task, error)
            other = model(input_ids=ids[own], adapter_names=["t1" if task == "t0" else "t0"] * len(own)).logits.double()
            assert float((other - alone).abs().max() / alone.abs().mean()) > 2 * bound, "tasks that could be mistaken"
        assert kernels.calls == len(model.base_model.routing.layers), "a task alone does not need it"


def check_float64() -> None:
    """The whole model in float32 by the kernel, and in float64 by torch's products."""
    exact, model = (adapted(build(dtype=dtype), 5) for dtype in (torch.float64, torch.float32))
    exact.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
    with torch.no_grad():
        wanted = exact(input_ids=tokens(), adapter_names=mixed(5)).logits
        found = model(input_ids=tokens(), adapter_names=mixed(5)).logits
    torch.testing.assert_close(found.double(), wanted, atol=1e-3, rtol=1e-3)


def check_changes() -> None:
    """Whatever is written to a parameter is what the next pass reads, by `.data` too."""
    model, ids = adapted(build(), 3), tokens()
    weights = [weight for name, weight in model.named_parameters() if "inlay_multi_lora_b.t1" in name]

    def logits() -> Tensor:
        with torch.inference_mode():
            return model(input_ids=ids, adapter_names=mixed(3)).logits.clone()

    def alone() -> Tensor:
        with torch.inference_mode():
            return model(input_ids=ids[1::3], adapter_names=["t1"] * 4).logits.clone()

    before = logits()
    for change in (
        lambda weight: weight.data.mul_(-3),
        lambda weight: setattr(weight, "data", torch.randn_like(weight)),
        lambda weight: weight.detach().add_(1),
    ):
        for weight in weights:
            change(weight)
        found = logits()
        assert not torch.allclose(found[1::3], before[1::3], atol=1e-2)
        torch.testing.assert_close(found[1::3], alone(), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(found[0::3], before[0::3], atol=1e-3, rtol=1e-3)
        before = found


def check_graph(name: str) -> None:
    """Captured in a CUDA graph: replays read new inputs and new weights, whatever was run or let go in between."""
    dtype, _ = precision(name)
    model, names, ids = adapted(build(dtype=dtype), 3), mixed(3), tokens()

    def logits() -> Tensor:
        with precision(name)[1]:  # one for each pass: autocast keeps what it has cast
            return model(input_ids=ids, adapter_names=names).logits

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode():
        with torch.cuda.stream(side):
            for _ in range(3):
                logits()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = logits()
        for seed in range(2):
            for i in range(NAMES_KEPT + 5):  # as many as push out what was kept of these names
                model(input_ids=ids[:6], adapter_names=[f"t{(i >> j) % 2 + j % 2}" for j in range(6)])
            torch.empty(2**22, device=DEVICE).fill_(torch.nan)
            for key, weight in model.named_parameters():
                if "inlay_multi_lora_b.t2" in key:
                    weight.data.mul_(-2)
            ids.copy_(tokens(seed=seed + 5))
            graph.replay()
            wanted = logits()
            torch.testing.assert_close(captured, wanted, atol=2e-2, rtol=2e-2)


def check_graph_without_a_pass_before() -> None:
    """An error, and the parameters are as they were."""
    model, ids = adapted(build(), 3), tokens()
    before = {name: weight.clone() for name, weight in model.named_parameters() if "_b." in name}
    with torch.inference_mode():
        model(input_ids=ids)  # what else is loaded at first
        said = ""
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                model(input_ids=ids, adapter_names=mixed(3))
        except InlayError as error:
            said = str(error)
        assert "run it once" in said
    torch.cuda.synchronize()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters() if name in before)


def check_threads() -> None:
    """Passes of two threads, each in a stream of its own."""
    model, ids = adapted(build(), 4), tokens()
    lists = [["t0", "t1"] * 6, ["t3", "t2", "__base__"] * 4]
    with torch.no_grad():
        wanted = [model(input_ids=ids, adapter_names=names).logits for names in lists]
    torch.cuda.synchronize()
    failed: list[str] = []

    def work(number: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = model(input_ids=ids, adapter_names=lists[number]).logits
                if not torch.allclose(found, wanted[number], atol=1e-4):
                    failed.append(f"thread {number}: {float((found - wanted[number]).abs().max())}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[:3]


def check_compiled() -> None:
    """A compiler does not see the kernel: it takes torch's products."""
    model, ids = small("roberta", torch.float32), tokens()
    with torch.no_grad():
        wanted = model(input_ids=ids, adapter_names=mixed(5)).logits
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(compiled(input_ids=ids, adapter_names=mixed(5)).logits, wanted, atol=1e-3, rtol=1e-3)


def check_trained_after() -> None:
    """What passes without gradients have kept does not hinder a training step with the same names."""
    model, ids = adapted(build(), 3), tokens()
    with torch.inference_mode():
        model(input_ids=ids, adapter_names=mixed(3))
    model(input_ids=ids, adapter_names=mixed(3)).logits.sum().backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "_b.t1" in name)


BIG = [
    Product(dtype, x_dtype, slots=tuple(1 + i % 9 for i in range(rows)), shape=(rows, length), sizes=sizes, rank=rank)
    for dtype, x_dtype in ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32,) * 2)
    for rows, length, sizes, rank in (
        (64, 128, (1024, 1024), 8),
        (64, 1, (1024, 4096), 16),
        (3, 700, (4096, 512), 64),
        (300, 129, (520, 1032), 40),
    )
]
CHECKS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    *((check_kernel, (case,)) for case in (*CASES, *BIG, replace(BIG[0], thirds=(0, 2), sizes=(1024, 3072)))),
    *((check_each_task_alone, ("roberta", name, mode)) for name in PRECISIONS for mode in MODES),
    *((check_each_task_alone, ("gpt2", name, "inf")) for name in ("float32", "autocast bfloat16")),
    *((check_graph, (name,)) for name in ("float32", "bfloat16", "autocast bfloat16")),
    *((each, ()) for each in (check_float64, check_changes, check_graph_without_a_pass_before, check_threads)),
    *((each, ()) for each in (check_compiled, check_trained_after)),
]


def named(check: Callable[..., None], args: tuple[Any, ...]) -> str:
    return f"{check.__name__}{args}".replace("torch.", "")[:120]


# --------------------------------------------------------------------------------------------------------------- times


def timed(action: Callable[[], Any], repeats: int = 12) -> tuple[float, float]:
    """Milliseconds of a pass, and of them those of the host: until Python returns. Medians."""
    whole, host = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        action()
        host.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(whole), 1e3 * statistics.median(host)


def replayed(action: Callable[[], Any]) -> Callable[[], Any]:
    """The same pass as a CUDA graph: what the GPU alone takes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def time_passes(name: str, goals: dict[int, float]) -> None:
    """RoBERTa-large with heads, 64 rows of 128 tokens: base and mixed tasks, eager and as a CUDA graph."""
    dtype, _ = precision(name)
    base, ids = build(size=LARGE, dtype=dtype), tokens(ROWS, LENGTH)
    model = adapted(build(size=LARGE, dtype=dtype), 64)

    def run(tasks: int) -> None:
        with precision(name)[1]:  # one for each pass: autocast keeps what it has cast
            base(input_ids=ids) if not tasks else model(input_ids=ids, adapter_names=mixed(tasks, ROWS))

    with torch.inference_mode():
        actions = {tasks: partial(run, tasks) for tasks in (0, 2, 8, 64)}
        for action in actions.values():
            timed(action, 3)
        rounds = [{tasks: timed(action) for tasks, action in actions.items()} for _ in range(3)]
        graphs = {tasks: timed(replayed(action))[0] for tasks, action in actions.items()}
    for tasks in actions:
        whole, host = (statistics.median(found[tasks][i] for found in rounds) for i in range(2))
        over = statistics.median(found[tasks][0] / found[0][0] for found in rounds)
        goal = f"  goal <= {goals[tasks]:<5} {'met' if over <= goals[tasks] else 'MISSED'}" if tasks in goals else ""
        print(
            f"{name:<18} {tasks or 'base':>4} tasks {whole:7.2f} ms, host {host:6.2f} ms, {over:5.3f} x base; "
            f"CUDA graph {graphs[tasks]:7.2f} ms, {graphs[tasks] / graphs[0]:5.3f} x{goal}",
            flush=True,
        )


def time_kernel() -> None:
    """One call for 64 rows of 128 tokens, and for 64 of one token; the bytes that it must move at least."""
    for x_dtype, length in ((torch.float32, 128), (torch.bfloat16, 128), (torch.bfloat16, 1)):
        case = Product(
            torch.bfloat16, x_dtype, slots=tuple(range(1, 65)), shape=(64, length), sizes=(1024,) * 2, rank=8
        )
        given = case.tensors(DEVICE)
        flush = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        found = []
        for _ in range(20):
            flush.zero_()
            events[0].record()
            low_rank.add_by_slot(**given, offsets=case.offsets)
            events[1].record()
            torch.cuda.synchronize()
            found.append(1e3 * events[0].elapsed_time(events[1]))
        begin = time.perf_counter()
        for _ in range(200):
            low_rank.add_by_slot(**given, offsets=case.offsets)
        host = (time.perf_counter() - begin) / 200 * 1e6
        moved = sum(given[key].nbytes for key in ("x", "out", "out", "b")) / 2**20
        print(
            f"kernel, x {x_dtype}, {length:>3} tokens a row: {statistics.median(found):6.1f} us from a cold cache, "
            f"{moved:5.1f} MiB; launched back to back {host:5.1f} us each"
        )


def main() -> None:
    warnings.simplefilter("ignore")
    begin, failed = time.perf_counter(), 0
    for one in CHECKS:
        try:
            one[0](*one[1])
            torch.cuda.synchronize()
        except Exception:
            failed += 1
            print(f"FAILED {named(*one)}", traceback.format_exc(limit=-3), sep="\n", flush=True)
            if failed >= 12:
                break
    print(f"{len(CHECKS)} checks, {failed} failed, {time.perf_counter() - begin:.0f} s, {torch.cuda.get_device_name()}")
    time_kernel()
    time_passes("autocast bfloat16", {2: 1.15, 64: 1.3})
    time_passes("bfloat16", {2: 1.1, 64: 1.25})
    print(f"{time.perf_counter() - begin:.0f} s in all")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
