"""Bias tuning (BitFit): train the biases that the model has, and nothing else of it."""

from inlay.methods.registry import Method

METHOD = Method(
    name="bias",
    summary="Trains the existing biases of the model (BitFit).",
    family="scale and shift",
    paper="Ben Zaken et al., BitFit, ACL 2022, https://arxiv.org/abs/2106.10199",
    config="inlay.methods.bias.config:BiasTuningConfig",
    tuner="inlay.methods.bias.model:BiasTuningModel",
    peft_type="INLAY_BIAS",
    parameter_prefix="inlay_bias_",
    learning_rate=2e-3,
    grid=(3e-4, 1e-3, 3e-3, 1e-2),
    auto=("text", "image"),
    mergeable=True,
)
