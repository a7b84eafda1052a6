"""Run PEFT's test suite with our methods, one process a method, and count what came of it.

python -m peft_suite --peft <checkout> [--method ssf] [--record] [-- pytest's own options, such as -k merge]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, unknown
from peft_suite import page, stand_ins

HERE = Path(__file__).resolve().parent
FILES = (
    "test_custom_models",
    "test_decoder_models",
    "test_encoder_decoder_models",
    "test_feature_extraction_models",
    "test_seq_classifier",
    "test_token_classification_qa",
    "test_vision_models",
    "test_config",
)
NOTHING = 5  # pytest's exit status where no test was left


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: every test passed, or was refused as the table says."""
    parser = argparse.ArgumentParser(prog="python -m peft_suite", description=__doc__)
    parser.add_argument("--peft", required=True, help="a checkout of PEFT, of the version that is installed")
    parser.add_argument("--method", default="all", help="one method, or several with commas; lora is the control")
    parser.add_argument("--record", action="store_true", help="write the counts into docs/peft-suite.md")
    options, rest = parser.parse_known_args(arguments)
    try:
        checkout = check_checkout(Path(options.peft))
        methods = _methods(options.method)
    except InlayError as error:
        print(error, file=sys.stderr)
        return 2
    found = [run(checkout, method, [each for each in rest if each != "--"]) for method in methods]
    for counts in found:
        print(_in_a_line(counts))
        for deviation in counts["deviations"]:
            print(f"    {deviation['test']}\n        {deviation['error'].splitlines()[0]}")
    if options.record:
        page.record(found)
    return 1 if any(counts["deviations"] or counts["broken"] for counts in found) else 0


def check_checkout(folder: Path) -> Path:
    """The folder, if it is a checkout of PEFT with its tests and of the installed version."""
    import peft

    needed = [folder / "tests" / name for name in ("__init__.py", "testing_common.py", "testing_utils.py")]
    lacking = [path.name for path in needed if not path.is_file()]
    if lacking:
        raise InlayError(
            f"{folder} lacks tests/{', tests/'.join(lacking)}: give a checkout of PEFT, as `git clone --branch "
            f"v{peft.__version__} https://github.com/huggingface/peft` makes it."
        )
    stated = (folder / "src" / "peft" / "__init__.py").read_text(encoding="utf-8")
    if f'__version__ = "{peft.__version__}' not in stated:
        raise InlayError(f"{folder} is another version of PEFT than the installed {peft.__version__}: check that out.")
    return folder.resolve()


def run(checkout: Path, method: str, options: list[str]) -> dict[str, Any]:
    """What comes of PEFT's tests with one method."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini"), "--rootdir", str(checkout)),
            *("-p", "peft_suite.plugin", "--inlay-method", method, "--inlay-report", str(report), "--tb=short"),
            *(str(checkout / "tests" / f"{name}.py") for name in FILES),
            *options,
        ]
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        status = subprocess.run(command, check=False, env=environment).returncode
        counts: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else _none(method)
    counts["broken"] = status not in (0, NOTHING) and not counts["deviations"]
    return counts


def _none(method: str) -> dict[str, Any]:
    return {"method": method, "passed": 0, "skipped_by_peft": 0, "refused": {}, "left_out": {}, "deviations": []}


def _methods(asked: str) -> list[str]:
    known = stand_ins.methods()
    if asked == "all":
        return known
    for method in (chosen := asked.split(",")):
        if method not in known:
            raise unknown("method", method, known)
    return chosen


def _in_a_line(counts: dict[str, Any]) -> str:
    if counts["broken"]:
        return f"{counts['method']}: the tests could not be run"
    refused = sum(counts["refused"].values())
    return (
        f"{counts['method']}: {counts['passed']} passed, {refused} refused, {len(counts['deviations'])} deviations, "
        f"{counts['skipped_by_peft']} skipped by PEFT itself"
    )


if __name__ == "__main__":
    sys.exit(main())
