"""E2VPT: visual prompt tuning with prompts in the keys and values too, and prompts pruned by their importance."""

from inlay.methods.registry import Method

METHOD = Method(
    name="e2vpt",
    summary="Trained tokens before every block, keys and values in its attention; prompts can be pruned.",
    family="prompt",
    paper="Han et al., E2VPT, ICCV 2023, https://arxiv.org/abs/2307.13770",
    config="inlay.methods.e2vpt.config:E2VPTConfig",
    tuner="inlay.methods.e2vpt.model:E2VPTModel",
    peft_type="INLAY_E2VPT",
    parameter_prefix="inlay_e2vpt_",
    learning_rate=3e-3,
    grid=(1e-3, 3e-3, 1e-2, 3e-2),
    identity_at_start=False,
    unmergeable="its tokens, keys and values stand beside the image's, and no weight can hold them",
)
