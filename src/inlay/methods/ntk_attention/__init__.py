"""NTK-Attention: a prefix of any length as a few trained numbers in the softmax of every attention."""

from types import MappingProxyType

from inlay.methods.registry import Method, Writing

_WRITING = Writing(
    settings=MappingProxyType({"skip_first": True, "centred": True}),
    before=MappingProxyType({"skip_first": False, "centred": False}),
    source="short runs of one model, below; decoders alone",
    suits="inlay.methods.ntk_attention.writing:suitable",
)

METHOD = Method(
    name="ntk-attention",
    summary="Adds the effect of a prefix of any length to every softmax, with features of fixed size.",
    family="prefix",
    paper="Liang et al., Towards Infinite-Long Prefix in Transformer, 2024, https://arxiv.org/abs/2406.14036",
    config="inlay.methods.ntk_attention.config:NTKAttentionConfig",
    tuner="inlay.methods.ntk_attention.model:NTKAttentionModel",
    peft_type="INLAY_NTK_ATTENTION",
    parameter_prefix="inlay_ntk_",
    learning_rate=1e-2,
    grid=(1e-3, 3e-3, 1e-2, 3e-2),
    writing=_WRITING,
    compresses_prompts=True,
    unmergeable="it adds a term of each query to the softmax, which no weight can hold",
)
