"""SSF: scale and shift the features after every operation of the backbone."""

from inlay.methods.registry import Method

METHOD = Method(
    name="ssf",
    summary="Scales and shifts the output of every linear layer, convolution and norm.",
    family="scale and shift",
    paper="Lian et al., Scaling & Shifting Your Features, NeurIPS 2022, https://arxiv.org/abs/2210.08823",
    config="inlay.methods.ssf.config:SSFConfig",
    tuner="inlay.methods.ssf.model:SSFModel",
    peft_type="INLAY_SSF",
    parameter_prefix="inlay_ssf_",
    learning_rate=3e-3,
    grid=(3e-4, 1e-3, 3e-3, 1e-2),
    mergeable=True,
)
