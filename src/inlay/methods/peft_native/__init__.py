"""The methods that PEFT itself has, by name: nothing is rewritten; only targets and learning rates are chosen."""

from types import MappingProxyType

from inlay.methods.registry import Method

_DEFAULTS = "inlay.methods.peft_native.defaults"

METHODS = (
    Method(
        name="lora",
        summary="Adds a trained low-rank product to the query and value projections.",
        paper="Hu et al., LoRA, ICLR 2022, https://arxiv.org/abs/2106.09685",
        config="peft:LoraConfig",
        settings=MappingProxyType({"r": 8, "lora_alpha": 16}),
        defaults=f"{_DEFAULTS}:lora",
        learning_rate=1e-3,
        grid=(1e-4, 3e-4, 1e-3, 3e-3),
        mergeable=True,
    ),
    Method(
        name="vera",
        summary="LoRA with random frozen matrices shared by all layers; trains two vectors a layer.",
        paper="Kopiczko et al., VeRA, ICLR 2024, https://arxiv.org/abs/2310.11454",
        config="peft:VeraConfig",
        defaults=f"{_DEFAULTS}:vera",
        learning_rate=1e-2,
        grid=(3e-3, 1e-2, 3e-2),
        mergeable=True,
    ),
    Method(
        name="ia3",
        summary="Scales keys, values and feed-forward activations by trained vectors.",
        paper="Liu et al., IA3, NeurIPS 2022, https://arxiv.org/abs/2205.05638",
        config="peft:IA3Config",
        defaults=f"{_DEFAULTS}:ia3",
        learning_rate=5e-3,
        grid=(1e-3, 3e-3, 1e-2, 3e-2),
        mergeable=True,
    ),
    Method(
        name="ln",
        summary="PEFT's own layer norm tuning: layer and RMS norms of the blocks; `norm` covers batch norms too.",
        paper="Zhao et al., LayerNorm tuning, ICLR 2024, https://arxiv.org/abs/2312.11420",
        config="peft:LNTuningConfig",
        defaults=f"{_DEFAULTS}:ln",
        learning_rate=1e-3,
        grid=(3e-4, 1e-3, 3e-3, 1e-2),
        mergeable=True,
    ),
    Method(
        name="prefix",
        summary="Puts trained keys and values before those of every layer.",
        paper="Li and Liang, Prefix-Tuning, ACL 2021, https://arxiv.org/abs/2101.00190",
        config="peft:PrefixTuningConfig",
        settings=MappingProxyType({"num_virtual_tokens": 20}),
        defaults=f"{_DEFAULTS}:prefix",
        learning_rate=1e-2,
        grid=(1e-3, 3e-3, 1e-2, 3e-2),
        gradient_checkpointing=False,
        identity_at_start=False,
    ),
    Method(
        name="prompt",
        summary="Puts trained vectors before the token embeddings.",
        paper="Lester et al., Prompt tuning, EMNLP 2021, https://arxiv.org/abs/2104.08691",
        config="peft:PromptTuningConfig",
        settings=MappingProxyType({"num_virtual_tokens": 20}),
        defaults=f"{_DEFAULTS}:prompt",
        learning_rate=3e-2,
        grid=(3e-3, 1e-2, 3e-2, 1e-1),
        identity_at_start=False,
    ),
    Method(
        name="p-tuning",
        summary="Prompt tuning whose vectors come out of a small trained network.",
        paper="Liu et al., P-Tuning, 2021, https://arxiv.org/abs/2103.10385",
        config="peft:PromptEncoderConfig",
        settings=MappingProxyType({"num_virtual_tokens": 20, "encoder_hidden_size": 128}),
        defaults=f"{_DEFAULTS}:prompt",
        learning_rate=1e-3,
        grid=(3e-4, 1e-3, 3e-3, 1e-2),
        identity_at_start=False,
    ),
)
