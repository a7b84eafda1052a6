"""Multi-LoRA: many tasks on one frozen model, with one random low-rank factor for all of them."""

from types import MappingProxyType

from inlay.methods.registry import Method

METHOD = Method(
    name="multi-lora",
    summary="LoRA for many tasks in one batch: a frozen random A per matrix for all tasks, a trained B per task.",
    family="low-rank",
    paper="Parameter-Efficient Fine-Tuning via Partially Decomposable Loss Analysis and Sharing (anonymous, under "
    "review); after LoRA, https://arxiv.org/abs/2106.09685",
    config="inlay.methods.multi_lora.config:MultiLoraConfig",
    tuner="inlay.methods.multi_lora.model:MultiLoraModel",
    peft_type="INLAY_MULTI_LORA",
    parameter_prefix="inlay_multi_lora_",
    learning_rate=3e-3,
    grid=(3e-4, 1e-3, 3e-3, 1e-2),
    mergeable=True,
    mixes_tasks=True,
    exports=MappingProxyType({"lora": "inlay.methods.multi_lora.exchange:to_lora"}),
)
