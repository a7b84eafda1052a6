"""A compact prefix: a few keys and values for every head, each with a bias that says for how many it stands."""

from types import MappingProxyType

from inlay.methods.registry import Method

METHOD = Method(
    name="compact-prefix",
    summary="Puts trained keys and values, each with a bias, into every attention: a prefix, or a compressed prompt.",
    family="prefix",
    paper="Zweiger et al., Fast KV Compaction via Attention Matching, 2026; Li and Liang, Prefix-Tuning, ACL 2021, "
    "https://arxiv.org/abs/2101.00190",
    config="inlay.methods.compact_prefix.config:CompactPrefixConfig",
    tuner="inlay.methods.compact_prefix.model:CompactPrefixModel",
    peft_type="INLAY_COMPACT_PREFIX",
    parameter_prefix="inlay_compact_",
    learning_rate=1e-2,
    grid=(1e-3, 3e-3, 1e-2, 3e-2),
    identity_at_start=False,
    compresses_prompts=True,
    unmergeable="its keys and values stand beside the text's in attention, and no weight can hold them",
    prompt_forms=MappingProxyType(
        {"cartridge": ({"biases": False, "budgets": "equal"}, "inlay.methods.compact_prefix.exchange:to_cartridge")}
    ),
)
