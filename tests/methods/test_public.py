"""`import inlay` is light, whichever comes first, and the public names are what they say."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "imports",
    [
        "import inlay; import peft",
        "import peft; import inlay",
        "import transformers, inlay, peft",
        "import inlay.anatomy, inlay, peft",
        "from inlay.methods.bias.config import BiasTuningConfig; import peft",
        "import inlay; inlay.NormTuningConfig; import peft",
        "import inlay; import inlay.methods.norm.model; import peft",
        "import inlay.methods.tuner; import peft",
        "import inlay.methods.heads; import peft",
    ],
    ids=[
        "inlay",
        "peft",
        "transformers",
        "a-module-and-function",
        "a-config",
        "a-public-name",
        "a-tuner",
        "the-base-of-tuners",
        "what-tuners-need",
    ],
)
def test_in_any_order_methods_are_registered_and_anatomy_is_the_function(imports: str) -> None:
    code = f"""
{imports}
import inlay
print(type(inlay.anatomy).__name__)
config = inlay.BiasTuningConfig()
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as configs, PEFT_TYPE_TO_TUNER_MAPPING as tuners
print(configs["INLAY_BIAS"].__name__, tuners[config.peft_type].__name__, configs["INLAY_NORM"].__name__)
print(type(peft.__spec__.loader).__name__, peft.__loader__ is peft.__spec__.loader)
from inlay.anatomy import Part
print(type(inlay.anatomy).__name__)
"""
    assert run(code).splitlines() == [
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
