"""How fast conversations are prepared for training, and in how much memory.

A file of drawn conversations (two to eight turns of up to 80 words, a system prompt in every third) is read, divided
and encoded with embedded:smollm2's tokenizer and template, as `inlay tune` does before its first step. Each stage is
timed, and the time of processors counted, which a busy machine stretches less; `load` is how many processes wanted to
run meanwhile. Memory is the process's peak, and what
it was when the libraries were imported.

    python benchmarks/chat_data.py                   # 20,000 rows; writes results/chat-data.json
    python benchmarks/chat_data.py --rows 100000 --format parquet
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from commands import command as called_by
from transformers import AutoTokenizer

from inlay import tasks
from inlay.backbones import embedded
from inlay.records.spec import Spec
from inlay.records.versions import versions

RESULTS = Path(__file__).parent / "results" / "chat-data.json"
SYLLABLES = ["ba", "ce", "di", "fo", "gu", "la", "me", "ni", "po", "ru", "the", "and", "of", "in", "is"]


def draw(rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of drawn words, no two alike."""
    drawn = random.Random(seed)
    words = ["".join(drawn.choices(SYLLABLES, k=drawn.randrange(1, 4))) for _ in range(5000)]
    found = []
    for number in range(rows):
        turns = [{"role": "system", "content": "You answer in one paragraph."}] if number % 3 == 0 else []
        for turn in range(2 * drawn.randrange(1, 5)):
            text = " ".join(drawn.choices(words, k=drawn.randrange(5, 80)))
            turns.append({"role": ("user", "assistant")[turn % 2], "content": text})
        found.append({"id": number, "messages": turns})
    return found


def write(path: Path, rows: int) -> None:
    """The conversations as JSON lines or Parquet."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(draw(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in draw(rows)), encoding="utf-8")


def peak() -> float:
    """The most memory that this process has taken, in MiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)


def measure(path: Path, rows: int, max_length: int) -> dict[str, Any]:
    """Read, divide and encode; the seconds of each."""
    tokenizer = AutoTokenizer.from_pretrained(str(embedded.folder("embedded:smollm2").path))
    before, begin, worked = peak(), time.perf_counter(), time.process_time()
    task = tasks.load(Spec(model="embedded:smollm2", method="lora", data=str(path)))
    read, after = time.perf_counter(), peak()
    encoded = [task.encode(split, tokenizer, max_length) for split in ("train", "validation", "test")]
    end = time.perf_counter()
    return {
        "rows": rows,
        "tokens": int(sum(each.lengths.sum() for each in encoded)),
        "read_seconds": read - begin,
        "encode_seconds": end - read,
        "processor_seconds": time.process_time() - worked,
        "rows_per_second": rows / (end - begin),
        "read_mib": after,
        "peak_mib": peak(),
        "imported_mib": before,
        "load": os.getloadavg()[0],
        "file_mib": path.stat().st_size / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--format", choices=["jsonl", "parquet"], default="jsonl")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--write", type=Path, help="only write the file: drawing it takes memory too")
    args = parser.parse_args()
    if args.write:
        write(args.write, args.rows)
        return
    import subprocess

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"chats.{args.format}"
        shape = ["--rows", str(args.rows), "--write", str(path)]
        subprocess.run([sys.executable, __file__, *shape], check=True)
        found = measure(path, args.rows, args.max_length)
    for name, value in found.items():
        print(f"{name:16} {value:,.1f}")
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    kept[f"{args.format} {args.rows}"] = found | {"command": called_by(), "versions": versions()}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
