"""Attention scaling: train how sharply each head attends, and nothing else."""

from inlay.methods.registry import Method

METHOD = Method(
    name="attention-scale",
    summary="Scales the logits of attention, by query channel or by head.",
    family="scale and shift",
    paper="after Basu et al., AAAI 2024, https://arxiv.org/abs/2304.01917 (ATTNSCALE)",
    config="inlay.methods.attention_scale.config:AttentionScaleConfig",
    tuner="inlay.methods.attention_scale.model:AttentionScaleModel",
    peft_type="INLAY_ATTENTION_SCALE",
    parameter_prefix="inlay_attention_scale_",
    learning_rate=1e-2,
    grid=(1e-3, 3e-3, 1e-2, 3e-2),
    mergeable=True,
)
