"""Activation prompts: one trained perturbation of the feature map at one layer, the same for every input."""

from types import MappingProxyType

from inlay.methods.registry import Method

METHOD = Method(
    name="activation-prompt",
    summary="Adds a trained perturbation to the feature map at one layer.",
    family="prompt",
    paper="Zhang et al., Visual Prompting Reimagined: The Power of Activation Prompts, https://arxiv.org/abs/2604.06440",
    config="inlay.methods.activation_prompt.config:ActivationPromptConfig",
    tuner="inlay.methods.activation_prompt.model:ActivationPromptModel",
    peft_type="INLAY_ACTIVATION_PROMPT",
    parameter_prefix="inlay_activation_",
    prompt_parameter="inlay_activation_delta",
    learning_rate=3e-3,
    rates=MappingProxyType({"convolutional": 1e-3}),
    grid=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    first_layer=0,
    unmergeable="what it adds differs from place to place of a feature map, and a bias is the same at every place",
)
