"""A prompt on the pixels: the activation prompts' layer at `l = 0`, under a name of its own."""

from __future__ import annotations

from inlay.methods.activation_prompt.layer import PromptLayer


class VisualPromptLayer(PromptLayer):
    """`x <- g(x, delta)` at the stem's input; the templates `g` are in methods/activation_prompt/templates.py."""

    adapter_layer_names = ("inlay_visual_delta",)
