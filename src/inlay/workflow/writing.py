"""The defaults of tasks in which a language model writes: what a method declares for them (`Method.writing`).

They are written into the spec before the run has its name, so that a run says what it did. With the settings that a
method declares as those of before, its learning rate and the usual epochs, a run is what it was before there were such
defaults, and is found again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inlay.errors import InlayError
from inlay.methods import registry
from inlay.methods.protocol import Writing, load
from inlay.records.spec import FEW_SHOT_EPOCHS, Spec
from inlay.tasks import kinds

LARGE = 1e9  # parameters: from here on the activations of a usual batch take more memory than the model in 4 bits


def why_recomputed(kind: str, parameters: int, device: str) -> str | None:
    """Why activations are computed again in the backward pass where nobody says, as a line for people; None: they are
    kept. `device` is the type of the device."""
    if kind not in kinds.LANGUAGE_MODELS or parameters < LARGE or device != "cuda":
        return None
    return (
        "gradient checkpointing is on, as for every language model of 1B parameters or more that learns to write on "
        f"CUDA (this one has {parameters / 1e9:.1f}B): activations are computed again in the backward pass, which "
        "takes less memory and more time; --no-gradient-checkpointing keeps them"
    )


def settings_before(name: str) -> dict[str, Any]:
    """The settings that give a method what it had on these tasks before it had defaults for them."""
    writing = registry.get(name).writing
    return {} if writing is None else dict(writing.before)


def option_before(name: str) -> str:
    """The same as options of the command line."""
    return " ".join(f"--set {setting}={_in_words(value)}" for setting, value in settings_before(name).items())


def with_writing_defaults(asked: Spec, spec: Spec, kind: str, examples: int | None) -> tuple[Spec, list[str]]:
    """`spec` with the defaults of its method for a kind of task in which the model writes, where `asked`, what the user
    gave, does not say otherwise; and a line for people."""
    method = registry.get(spec.method)
    writing = method.writing
    if writing is None or kind not in kinds.LANGUAGE_MODELS or writing.settings.keys() & asked.settings.keys():
        return spec, []
    settings, why_not = _suitable(writing, asked, kind)
    if not settings:
        return spec, []
    said = [f"{name}={_in_words(value)}" for name, value in settings.items()]
    spec, of = spec.with_(settings={**settings, **spec.settings}), "a language model"
    if writing.sizes:
        spec, trained, parameters = _with_size(asked, spec, writing, examples)
        said += trained
        of = f"a language model of {f'{parameters / 1e6:,.0f}M parameters' if parameters else 'unknown size'}"
    told = f"{', '.join(said)}: the defaults of {method.name} where {of} writes" + (f"; {why_not}" if why_not else "")
    return spec, [f"{told} (docs/methods/{method.name}.md; {option_before(method.name)}: as before)"]


def _with_size(asked: Spec, spec: Spec, writing: Writing, examples: int | None) -> tuple[Spec, list[str], int]:
    """The spec with the training defaults by the model's size, which were taken, in words, and that size."""
    from inlay.backbones.skeleton import count_parameters

    said = []
    parameters = count_parameters(spec.model, spec.revision)
    size = writing.of_size(parameters)
    if asked.learning_rate is None:
        spec = spec.with_(learning_rate=size.learning_rate)
        said.append(f"learning rate {size.learning_rate:g}")
    if (asked.epochs, asked.batch_size, asked.max_steps) == (None, None, None):
        epochs, batch_size = spec.amount(examples)
        epochs = size.few_epochs if epochs == FEW_SHOT_EPOCHS else size.epochs
        spec = spec.with_(epochs=epochs, batch_size=batch_size)
        said.append(f"{epochs:g} epochs of batches of {batch_size}")
    return spec, said, parameters


def _suitable(writing: Writing, asked: Spec, kind: str) -> tuple[Mapping[str, Any], str | None]:
    """The settings that go with what was given and with the model, and why others do not, as a clause."""
    if writing.suits is None:
        return writing.settings, None
    if asked.init_adapter is not None:  # it was made with the settings that it has
        return {}, None
    from inlay.backbones.skeleton import load_skeleton

    try:
        model = load_skeleton(asked.model, asked.revision, kinds.get(kind).head.auto_class)
    except InlayError:  # its own code, which nobody ran yet: nothing is known of it
        return {}, None
    names, why_not = load(writing.suits)(asked.settings, model)
    return {name: value for name, value in writing.settings.items() if name in names}, why_not


def _in_words(value: Any) -> str:
    """A value as --set takes it."""
    return value if isinstance(value, str) else json.dumps(value)
