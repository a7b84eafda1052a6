"""`import inlay` is light, whichever comes first, and the public names are what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import inlay
from inlay.methods.registry import all_methods


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_is_light() -> None:
    code = (
        "import inlay, inlay.methods.registry as r, sys; r.all_methods(); print({'torch', 'peft'} & set(sys.modules))"
    )
    assert run(code) == "set()"


ORDERS = {
    "inlay": "import inlay; import peft",
    "peft": "import peft; import inlay",
    "transformers": "import transformers, inlay, peft",
    "a-module-and-function": "import inlay.anatomy, inlay, peft",
    "a-config": "from inlay.methods.bias.config import BiasTuningConfig; import peft",
    "a-public-name": "import inlay; inlay.NormTuningConfig; import peft",
    "a-tuner": "import inlay; import inlay.methods.norm.model; import peft",
    "the-base-of-tuners": "import inlay.methods.tuner; import peft",
    "what-tuners-need": "import inlay.methods.heads; import peft",
}
AFTERWARDS = """
import inlay
print(type(inlay.anatomy).__name__)
config = inlay.BiasTuningConfig()
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as configs, PEFT_TYPE_TO_TUNER_MAPPING as tuners
print(configs["INLAY_BIAS"].__name__, tuners[config.peft_type].__name__, configs["INLAY_NORM"].__name__)
print(type(peft.__spec__.loader).__name__, peft.__loader__ is peft.__spec__.loader)
from inlay.anatomy import Part
print(type(inlay.anatomy).__name__)
"""
# A process that has imported what is heavy and knows nothing of inlay, PEFT or Transformers: each order of imports is
# one of its forks, and as fresh as a process of its own.
FORKS = """
import gc, json, os, sys
gc.disable()
import pandas, scipy.stats, sklearn.metrics, torch.distributed.tensor, torch._inductor.compile_fx
assert not {"inlay", "peft", "transformers", "accelerate"} & set(sys.modules)
gc.freeze()
gc.enable()
for code, out in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        sys.stdout = open(out, "w")
        exec(code, {"__name__": "__main__"})
        sys.stdout.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is printed after each order of imports."""
    codes = {name: f"{imports}\n{AFTERWARDS}" for name, imports in ORDERS.items()}
    if not hasattr(os, "fork"):
        return {name: run(code) for name, code in codes.items()}
    folder = tmp_path_factory.mktemp("orders")
    work = json.dumps([(code, str(folder / name)) for name, code in codes.items()])
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(command, input=work, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: (folder / name).read_text() for name in codes}


@pytest.mark.parametrize("order", ORDERS)
def test_in_any_order_methods_are_registered_and_anatomy_is_the_function(order: str, printed: dict[str, str]) -> None:
    assert printed[order].splitlines() == [
        "function",
        "BiasTuningConfig BiasTuningModel NormTuningConfig",
        "SourceFileLoader True",
        "function",
    ]


def test_peft_is_not_imported_for_other_names() -> None:
    assert run("import inlay, sys; inlay.InlayError, inlay.Spec; print('peft' in sys.modules)") == "False"


def test_anatomy_stays_the_function() -> None:
    import inlay.anatomy as module_or_function

    assert callable(inlay.anatomy)
    assert callable(module_or_function)


def test_the_configs_of_our_methods_are_public() -> None:
    ours = {m.config.partition(":")[2] for m in all_methods().values() if m.tuner and m.config}
    assert {"BiasTuningConfig", "NormTuningConfig"} <= ours <= set(dir(inlay))
    for name in ours:
        assert getattr(inlay, name).__name__ == name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        inlay.nothing_of_the_kind  # noqa: B018
