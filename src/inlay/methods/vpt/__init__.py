"""Visual prompt tuning: trained tokens beside the patches of an image, at the first block, at every block, or gated."""

from types import MappingProxyType
from typing import Any

from inlay.methods.registry import Method

_VPT = "Jia et al., Visual Prompt Tuning, ECCV 2022, https://arxiv.org/abs/2203.12119"


def _method(name: str, summary: str, paper: str, settings: dict[str, Any], rate: float = 3e-3) -> Method:
    return Method(
        name=name,
        summary=summary,
        paper=paper,
        family="prompt",
        config="inlay.methods.vpt.config:VPTConfig",
        tuner="inlay.methods.vpt.model:VPTModel",
        peft_type="INLAY_VPT",
        parameter_prefix="inlay_vpt_",
        prompt_parameter="inlay_vpt_prompts",
        settings=MappingProxyType(settings),
        learning_rate=rate,
        grid=(1e-3, 3e-3, 1e-2, 3e-2),
        identity_at_start=False,
        unmergeable="its tokens stand beside the image's patches, and no weight can hold them",
    )


METHODS = (
    _method("vpt-shallow", "Puts trained tokens beside the patches before the first block.", _VPT, {"deep": False}),
    _method("vpt-deep", "Puts trained tokens beside the patches before every block.", _VPT, {"deep": True}),
    _method(
        "gate-vpt",
        "Trained tokens beside the patches, and for every block a gate on how much it changes them.",
        "Yoo et al., Improving Visual Prompt Tuning for Self-supervised Vision Transformers, ICML 2023, "
        "https://arxiv.org/abs/2306.05067",
        {"deep": False, "gated": True, "temperature": True},
        rate=1e-2,
    ),
)
