"""Visual prompting: one trained perturbation of the pixels, the same for every image."""

from types import MappingProxyType

from inlay.methods.registry import Method

METHOD = Method(
    name="visual-prompt",
    summary="Adds a trained perturbation to the pixels of every image, or a trained frame around it.",
    family="prompt",
    paper="Bahng et al., Exploring Visual Prompts, 2022, https://arxiv.org/abs/2203.17274",
    config="inlay.methods.visual_prompt.config:VisualPromptConfig",
    tuner="inlay.methods.visual_prompt.model:VisualPromptModel",
    peft_type="INLAY_VISUAL_PROMPT",
    parameter_prefix="inlay_visual_",
    prompt_parameter="inlay_visual_delta",
    learning_rate=3e-3,
    rates=MappingProxyType({"convolutional": 1e-3}),
    grid=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    unmergeable="what it adds differs from pixel to pixel, and a bias is the same at every place",
)
