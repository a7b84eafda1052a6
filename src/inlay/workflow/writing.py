"""The defaults of tasks in which a language model writes: what a method declares for them (`Method.writing`).

They are written into the spec before the run has its name, so that a run says what it did. `target_modules=null` is the
method's default of all other tasks, with its learning rate and the usual epochs: what these tasks had before, and the
same runs.
"""

from __future__ import annotations

from inlay.methods import registry
from inlay.records.spec import FEW_SHOT_EPOCHS, Spec
from inlay.tasks import kinds

BEFORE = {"target_modules": None}
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


def with_writing_defaults(asked: Spec, spec: Spec, kind: str, examples: int | None) -> tuple[Spec, list[str]]:
    """`spec` with the defaults of its method for a kind of task in which the model writes, where `asked`, what the user
    gave, does not say otherwise; and a line for people."""
    method = registry.get(spec.method)
    writing = method.writing
    if writing is None or kind not in kinds.LANGUAGE_MODELS or writing.settings.keys() & asked.settings.keys():
        return spec, []
    from inlay.backbones.skeleton import count_parameters

    parameters = count_parameters(spec.model, spec.revision)
    size = writing.of_size(parameters)
    said = [f"{name}={value}" for name, value in writing.settings.items()]
    spec = spec.with_(settings={**writing.settings, **spec.settings})
    if asked.learning_rate is None:
        spec = spec.with_(learning_rate=size.learning_rate)
        said.append(f"learning rate {size.learning_rate:g}")
    if (asked.epochs, asked.batch_size, asked.max_steps) == (None, None, None):
        epochs, batch_size = spec.amount(examples)
        epochs = size.few_epochs if epochs == FEW_SHOT_EPOCHS else size.epochs
        spec = spec.with_(epochs=epochs, batch_size=batch_size)
        said.append(f"{epochs:g} epochs of batches of {batch_size}")
    of = f"{parameters / 1e6:,.0f}M parameters" if parameters else "unknown size"
    told = f"{', '.join(said)}: the defaults of {method.name} where a language model of {of} writes"
    return spec, [f"{told} (docs/methods/{method.name}.md; --set target_modules=null: as before)"]
