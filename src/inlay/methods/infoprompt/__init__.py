"""Soft prompts in a template: InfoPrompt, and as settings of the same module WARP and IDPG."""

from types import MappingProxyType
from typing import Any

from inlay.methods.registry import Method


def _method(name: str, summary: str, paper: str, settings: dict[str, Any], decoder_rate: float) -> Method:
    """Rates were chosen on held-out rows: docs/infoprompt-measured.md."""
    return Method(
        name=name,
        summary=summary,
        paper=paper,
        family="prompt",
        config="inlay.methods.infoprompt.config:InfoPromptConfig",
        tuner="inlay.methods.infoprompt.model:InfoPromptModel",
        peft_type="INLAY_INFOPROMPT",
        parameter_prefix="inlay_infoprompt_",
        settings=MappingProxyType(settings),
        learning_rate=3e-1,
        rates=MappingProxyType({"decoder": decoder_rate}),
        grid=(1e-2, 3e-2, 1e-1, 3e-1, 1.0),
        identity_at_start=False,
        prompts_in_text=True,
        unmergeable="its prompt tokens stand in the text, and no weight can hold them",
    )


METHODS = (
    _method(
        "infoprompt",
        "Generates prompt tokens from each text, and trains them to share information with the task.",
        "Wu et al., InfoPrompt, NeurIPS 2023, https://arxiv.org/abs/2306.04933",
        {},
        decoder_rate=1e-1,
    ),
    _method(
        "warp",
        "Puts the same trained prompt tokens into every text, and class vectors at its mask.",
        "Hambardzumyan et al., WARP, ACL 2021, https://arxiv.org/abs/2101.00121",
        {"encoder": "static", "beta": 0.0, "gamma": 0.0},
        decoder_rate=3e-2,
    ),
    _method(
        "idpg",
        "Generates prompt tokens from each text with one small network.",
        "Wu et al., IDPG, NAACL 2022, https://arxiv.org/abs/2204.04497",
        {"encoder": "shared-bottleneck", "beta": 0.0, "gamma": 0.0},
        decoder_rate=3e-2,
    ),
)
