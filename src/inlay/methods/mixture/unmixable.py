"""Which LoRAs cannot share a pass with others, by what their configs say and where they are."""

from __future__ import annotations

from typing import Any

from inlay.errors import InlayError

TURNED = ("xlnet",)
METHOD = "lora"  # what is mixed, by its name in the registry
# What a config asks for that is not a low-rank product of its own rows.
OTHERWISE = {
    "use_dora": "it is a DoRA, which rescales whole columns of the weight",
    "alora_invocation_tokens": "it is an aLoRA, which acts from a token on",
    "trainable_token_indices": "it trains tokens of the embedding (trainable_token_indices)",
    "target_parameters": "it adapts parameters rather than layers (target_parameters)",
    "arrow_config": "it chooses among other adapters (Arrow)",
    "use_qalora": "it is a QALoRA, which adapts groups of channels",
    "use_bdlora": "it is a BD-LoRA, whose factors are block-diagonal",
    "kasa_config": "it is a KaSA, which scales singular values",
    "monteclora_config": "it is a MonteCLoRA, which draws its factors",
    "velora_config": "it is a VeLoRA, which trains by compressed activations",
    "layer_replication": "it repeats layers of the base model (layer_replication)",
}
# Starts that take what the adapter begins with out of the base model's weights, which all adapters share.
CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")


def why_not(config: Any) -> str | None:
    """Why an adapter of this config cannot be mixed; None where it can."""
    for setting, why in OTHERWISE.items():
        if getattr(config, setting, None):
            return why
    if getattr(config, "bias", "none") != "none":
        return f"it trains biases of the base model, which all rows share (bias={config.bias!r})"
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.startswith(CHANGING):
        return (
            f"it changes the base model's weights at its start (init_lora_weights={start!r}); save it as an ordinary "
            "LoRA (PEFT: path_initial_model_for_weight_conversion)"
        )
    return None


def check_model(model: Any) -> None:
    """An error for a model whose rows cannot be told apart."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in TURNED:
        raise InlayError(
            f"A model of type {kind!r} has its tokens first and its rows second: its rows cannot have different "
            "adapters. Run one adapter at a time."
        )


def why_not_at(place: str) -> str | None:
    """Why a layer of this plain name cannot be adapted in mixed passes; None where it can."""
    if "experts" in place.split("."):
        return f"it adapts {place}, an expert, which is given tokens of all rows without saying whose they are"
    return None
