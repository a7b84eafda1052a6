"""How long a report on 1,000 runs takes to build, and to open in a browser.

One short real run is made and its record copied, by the store's own functions, under other methods, tasks, seeds and
learning rates. Building is `inlay.report.html.write_report`, in a process that has done nothing before; opening is from
`goto` until the page's script has drawn everything, in headless Chromium, each time in a new context. The bounds are
10 s and 3 s.

    python benchmarks/report.py            # prints both, writes benchmarks/results/report-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

BUILD, OPEN = 10.0, 3.0
RESULTS = Path(__file__).parent / "results" / "report-cpu.json"
METHODS = ("linear-probe", "bias", "norm", "lora", "activation-prompt", "ssf", "vpt-deep", "adaptformer", "full")


def copy(folder: Path, runs: int) -> None:
    """A folder of that many runs: one real one, and its like."""
    from inlay import Spec
    from inlay.records import predictions
    from inlay.records.store import Run, Store
    from inlay.workflow.tune import tune

    spec = Spec(
        model="embedded:vit", task="digits", method="bias", shots=40, max_steps=60, batch_size=8, evaluations=10
    )
    real = tune(spec, folder, progress=False)
    history = (real.folder / "metrics.jsonl").read_text(encoding="utf-8")
    chance = random.Random(0)

    (kept,) = real.predictions.values()

    def one(spec: Spec) -> Run:
        record = json.loads(json.dumps(real.record))
        record["metrics"]["test"]["accuracy"] = chance.uniform(0.3, 0.99)
        record["metrics"]["validation"]["accuracy"] = chance.uniform(0.3, 0.99)
        record["portrait"]["parameters"]["trained"] = int(10 ** chance.uniform(3, 6.5))
        with Store(folder).open(spec, spec.digest()) as run:
            (run.folder / "metrics.jsonl").write_text(history, encoding="utf-8")
            run.keep({"digits": predictions.read(kept)})
            run.finish(record)
        return run

    made = 1
    while made < runs:
        seed, rest = made % 5, made // 5
        method, rest = METHODS[rest % len(METHODS)], rest // len(METHODS)
        shots, rest = (40, 80, 160)[rest % 3], rest // 3
        one(spec.with_(seed=seed, method=method, shots=shots, learning_rate=0.001 * (1 + rest)))
        made += 1


def build(folder: Path, out: Path) -> tuple[float, float]:
    """Seconds of writing the page, and of the processor's time, in a process of its own; with what Python imports."""
    code = (
        "import sys, time; began = time.perf_counter(); from pathlib import Path; "
        "from inlay.report.html import write_report; write_report(Path(sys.argv[1]), Path(sys.argv[2])); "
        "print(time.perf_counter() - began, time.process_time())"
    )
    command = [sys.executable, "-c", code, str(folder), str(out)]
    wall, processor = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(wall), float(processor)


def opened(page: Path, repeats: int) -> list[float]:
    """Seconds until the page has drawn itself."""
    from playwright.sync_api import sync_playwright

    times = []
    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(repeats):
            tab = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            began = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-ready]")
            tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            times.append(time.perf_counter() - began)
            tab.context.close()
        browser.close()
    return times


def main() -> int:
    """Make the runs, measure, write the result; status 1 above a bound."""
    from inlay.records.versions import versions

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, page = Path(temporary) / "runs", Path(temporary) / "report.html"
        copy(folder, arguments.runs)
        building, working = zip(*(build(folder, page) for _ in range(arguments.repeats)), strict=True)
        size = page.stat().st_size
        opening = opened(page, arguments.repeats)
    result = {
        "what": "seconds to build the report, and until a new tab of headless Chromium has drawn it; median of repeats",
        "bounds": {"build_seconds": BUILD, "open_seconds": OPEN},
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "runs": arguments.runs,
        "repeats": arguments.repeats,
        "bytes": size,
        "load_average": round(os.getloadavg()[0], 1),
        "build_seconds": round(median(building), 3),
        "build_processor_seconds": round(median(working), 3),
        "build_worst": round(max(building), 3),
        "open_seconds": round(median(opening), 3),
        "open_worst": round(max(opening), 3),
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{arguments.runs} runs, {size / 1e6:.1f} MB: built in {median(building):.2f} s (bound {BUILD:g})")
    print(f"opened in {median(opening):.2f} s (bound {OPEN:g})")
    return int(median(building) > BUILD or median(opening) > OPEN)


if __name__ == "__main__":
    sys.exit(main())
