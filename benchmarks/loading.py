"""Peak memory of loading a backbone, against the size of the loaded model.

A Llama-shaped checkpoint of about a gigabyte with random weights is written to a temporary folder, once in single and
once in half precision. Each is loaded in a process of its own, through `inlay.backbones.load` and, for comparison,
through Transformers' `from_pretrained` alone. The peak is the kernel's high-water mark of resident memory less what the
process held before loading (imports included). The bound is 1.2.

    python benchmarks/loading.py            # prints the ratios, writes benchmarks/results/loading.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev

BOUND = 1.2
RESULTS = Path(__file__).parent / "results" / "loading.json"
PACKAGES = ("inlay", "torch", "transformers", "safetensors")


def resident(field: str) -> int:
    """A figure of this process in bytes: `VmRSS` for now, `VmHWM` for the most so far."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def write_checkpoint(folder: Path, layers: int) -> None:
    """The checkpoint in both precisions, with a tokenizer that knows enough to be accepted."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    words = {f"w{index}": index for index in range(1000)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0", pad_token="w1"
    )
    for name in ("float32", "float16"):
        model.to(getattr(torch, name)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def measure(folder: Path, way: str) -> None:
    """Load once in this process and print what it took."""
    import time

    import torch
    import transformers.models.llama.modeling_llama  # imports are not what is measured

    from inlay import backbones

    load = backbones.load
    before, began = resident("VmRSS"), time.perf_counter()
    if way == "inlay":
        model = load(str(folder), kind="causal-lm").model
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        # Weights that are still in the mapped file count once they are used.
        sum(float(parameter.detach().sum()) for parameter in model.parameters())
    seconds, peak = time.perf_counter() - began, resident("VmHWM") - before
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    print(json.dumps({"bytes": size, "peak_bytes": peak, "ratio": peak / size, "seconds": seconds}))


def machine() -> str:
    """This machine in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{platform.system()} on {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB of memory"


def main() -> int:
    """Write the checkpoints, measure each way in fresh processes, write the result; status 1 above the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=18, help="18 layers are a gigabyte in single precision")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(Path(arguments.measure[0]), arguments.measure[1])
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        write_checkpoint(Path(temporary), arguments.layers)
        for way in ("inlay", "transformers"):
            for stored in ("float32", "float16"):
                command = [sys.executable, __file__, "--measure", str(Path(temporary) / stored), way]
                runs = [
                    json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                    for _ in range(arguments.repeats)
                ]
                ratios = [run["ratio"] for run in runs]
                rows.append(
                    {
                        "way": way,
                        "stored": stored,
                        "loaded": "float32",
                        "model_bytes": runs[0]["bytes"],
                        "ratio": round(mean(ratios), 3),
                        "spread": round(stdev(ratios), 4) if len(ratios) > 1 else 0.0,
                        "seconds": round(mean(run["seconds"] for run in runs), 2),
                    }
                )
                print(f"{way:12} stored in {stored}: peak {rows[-1]['ratio']:.2f} x the model's size")
    result = {
        "what": "peak resident memory while loading, less what the process held before, over the size of the model",
        "bound": BOUND,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        ).stdout.strip(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "machine": machine(),
        "repeats": arguments.repeats,
        "results": rows,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    worst = max(row["ratio"] for row in rows if row["way"] == "inlay")
    print(f"worst of inlay: {worst:.2f} (bound {BOUND})")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
