"""The memory and the speed of training beside a quantised base: a Llama of a given shape, with random weights.

    python benchmarks/quantised.py                                     # small, on a CPU
    python benchmarks/quantised.py --shape 8b --rows 4 --length 2048 --precision bfloat16 --checkpointing \\
        --quantize 4bit --methods lora,ntk-attention --goal 10         # the goal for one GPU

It writes the checkpoint to a temporary folder (16 GB for 8b), loads it as `inlay.load_backbone` does, and makes some
updates with the loss of `causal-lm` and AdamW; the loss is that of `inlay.tune`, `inlay.lean_loss`, unless `--logits
whole`. Peak memory is measured as in a run's portrait, the model included. With `--goal` a method that needs more GiB
is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import inlay
from inlay.backbones.devices import pick_device, pick_dtype
from inlay.methods.attach import attach, trained_parameters
from inlay.portrait import PeakMemory
from inlay.records.versions import versions

SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "wide": {
        "vocab_size": 128_256,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
GIB = 2**30


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--quantize", default="none,4bit,8bit,int8", help="separated by commas; none is the full base")
    parser.add_argument("--methods", default="lora,ntk-attention")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--logits", default="pieces", help="pieces, whole (the loss of Transformers) or both, by comma")
    parser.add_argument("--goal", type=float, help="GiB at most")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is written and left")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "config.json").is_file():
            write_checkpoint(folder, args.shape, args.length)
        for kind in args.quantize.split(","):
            for method in args.methods.split(","):
                for logits in args.logits.split(","):
                    found.append(measure(str(folder), None if kind == "none" else kind, method, logits, args))
                    print(json.dumps(found[-1]), flush=True)
                    keep(found, args)  # as it goes: a machine may be lent for a short time
    over = [each for each in found if args.goal is not None and each["peak_gib"] > args.goal]
    for each in over:
        print(
            f"{each['method']} on {each['quantize']} needs {each['peak_gib']} GiB, above {args.goal}", file=sys.stderr
        )
    return 1 if over else 0


def keep(found: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """What was measured so far, in the file that was asked for."""
    if args.out is not None:
        setting = {name: str(value) for name, value in vars(args).items()}
        kept = {"setting": setting, "versions": versions(), "results": found}
        args.out.write_text(json.dumps(kept, indent=1) + "\n")


def write_checkpoint(folder: Path, shape: str, length: int) -> None:
    """A Llama of this shape with random weights in bfloat16, and a tokenizer of as many words."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=length, tie_word_embeddings=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(pick_device()):
            LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    vocabulary = {"<unk>": 0} | {f"w{number}": number for number in range(1, config.vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>").save_pretrained(folder)


def measure(folder: str, kind: str | None, method: str, logits: str, args: argparse.Namespace) -> dict[str, Any]:
    """A few updates of a method on one base."""
    device = pick_device()
    dtype = pick_dtype(args.precision, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    backbone = inlay.load_backbone(folder, kind="causal-lm", quantize=kind, compute_dtype=dtype)
    model = attach(backbone.model.to(device), method, newly_initialised=backbone.newly_initialised)
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(trained_parameters(model).values(), lr=1e-4)
    torch.manual_seed(1)
    ids = torch.randint(SHAPES[args.shape]["vocab_size"], (args.rows, args.length), device=device)
    memory, seconds, losses = PeakMemory(model, device), [], []
    lean = inlay.lean_loss(model) if logits == "pieces" else nullcontext()
    with lean, inlay.rounded_once(model, dtype):
        memory.start()
        for _ in range(args.steps):
            began = time.perf_counter()
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # waits for the device
            seconds.append(time.perf_counter() - began)
        peak = memory.stop()
    return {
        "quantize": kind or "none",
        "method": method,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "logits": logits,
        "peak_gib": round(peak["bytes"] / GIB, 3),
        "tokens_per_second": round(args.rows * args.length / min(seconds[1:] or seconds), 1),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }


if __name__ == "__main__":
    sys.exit(main())
