"""Loading one more LoRA into a model that mixes them: by PEFT's own `load_adapter`, with a head of its own size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from inlay.errors import InlayError, first_line


@contextmanager
def taking_in(model: Any, source: Any, name: str, hub: Mapping[str, Any]) -> Iterator[None]:
    """A LoRA from a folder or a repository is loaded inside. Where that fails it is taken out again, and the others go
    on. Models that do not mix are none of this one's affair."""
    from inlay.methods.mixture.lora import MixedTuner

    tuner: Any = getattr(model, "base_model", None)
    if not isinstance(tuner, MixedTuner):
        yield
        return
    if name in tuner.peft_config:
        raise InlayError(f"There is an adapter called {name!r} already. Delete it first, or take another name.")
    tuner.outputs_expected = _outputs(tuner.model, source, hub)
    try:
        yield
    except Exception as error:
        if name in tuner.peft_config:
            tuner.delete_adapter(name)
        if isinstance(error, InlayError):
            raise
        raise InlayError(
            f"The adapter in {source} cannot be loaded into {type(tuner.model).__name__}: {first_line(error)} Is it of "
            f"this base model? The others go on: {', '.join(tuner.peft_config)}."
        ) from error
    finally:
        tuner.outputs_expected = None


def _outputs(base: Any, source: Any, hub: Mapping[str, Any]) -> int | None:
    """How many outputs the head beside an adapter has; None where it has none."""
    from inlay.methods import vetting
    from inlay.methods.folder import WEIGHTS
    from inlay.methods.mixture.heads import outputs_in
    from inlay.methods.plain import WRAPPED
    from inlay.methods.pooling_notes import find_file

    path = find_file(str(source), WEIGHTS["peft"], hub)
    if path is None:
        return None  # PEFT says what is wrong
    tensors = {key.removeprefix(WRAPPED): value for key, value in vetting.read_shapes(path).items()}
    return outputs_in(base, tensors)
