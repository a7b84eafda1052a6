"""Norm tuning: train the scales and shifts of the normalisation layers, and nothing else of the model."""

from inlay.methods.registry import Method

METHOD = Method(
    name="norm",
    summary="Trains the scales and shifts of the normalisation layers.",
    family="scale and shift",
    paper="Basu et al., AAAI 2024, https://arxiv.org/abs/2304.01917; Frankle et al., ICLR 2021, https://arxiv.org/abs/2003.00152",
    config="inlay.methods.norm.config:NormTuningConfig",
    tuner="inlay.methods.norm.model:NormTuningModel",
    peft_type="INLAY_NORM",
    parameter_prefix="inlay_norm_",
    learning_rate=3e-3,
    grid=(3e-4, 1e-3, 3e-3, 1e-2),
    auto=("writing",),
    mergeable=True,
)
