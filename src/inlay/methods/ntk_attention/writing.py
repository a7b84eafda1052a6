"""What of the defaults for tasks in which a language model writes goes with a model and with the settings given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from inlay.anatomy import anatomy
from inlay.errors import InlayError
from inlay.methods import prompts

FIRST = ("skip_first", "centred")


def suitable(given: Mapping[str, Any], model: Any) -> tuple[Collection[str], str | None]:
    """Which settings, and why not the others, as a clause.

    Both are of decoders and of an adapter that starts from zero; the centre is the key of a first token that the model
    names and can read by itself.
    """
    try:
        about = anatomy(model)
    except InlayError:  # attaching says why this model cannot be adapted
        return (), None
    if (about.kind, about.modality) != ("decoder", "text") or getattr(model.config, "is_encoder_decoder", False):
        return (), None
    if given.get("start", "zero") != "zero" or given.get("centre_id") is not None:
        return (), None
    token = getattr(model.config, "bos_token_id", None)
    if not isinstance(token, int):
        return ("skip_first",), "not centred, as its config names no first token (bos_token_id)"
    if token not in range(model.get_input_embeddings().weight.shape[0]):
        return ("skip_first",), f"not centred, as its first token (bos_token_id {token}) is none of its tokens"
    try:
        prompts.check(model, [token])
    except InlayError:  # of a first token alone, one thing is left that it objects to
        return ("skip_first",), "not centred, as its rotary embedding changes with the length of the text"
    return FIRST, None
