"""AdaptFormer: a small bottleneck beside the feed-forward of every block."""

from inlay.methods.registry import Method

METHOD = Method(
    name="adaptformer",
    summary="Adds a small bottleneck beside the feed-forward of every block.",
    family="adapter",
    paper="Chen et al., AdaptFormer, NeurIPS 2022, https://arxiv.org/abs/2205.13535",
    config="inlay.methods.adaptformer.config:AdaptFormerConfig",
    tuner="inlay.methods.adaptformer.model:AdaptFormerModel",
    peft_type="INLAY_ADAPTFORMER",
    parameter_prefix="inlay_adaptformer_",
    learning_rate=3e-3,
    grid=(3e-4, 1e-3, 3e-3, 1e-2),
    unmergeable="its bottleneck has an activation function, which no weight can hold",
)
