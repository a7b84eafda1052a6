"""What is a low-rank product by another name, as a plain LoRA adapter of PEFT's.

VeRA has y = W_0 x + (b * B) (d * A) x, with A and B that all layers share and two trained vectors d and b per layer: a
LoRA whose factors are d * A and b * B, of the part of A and B that the layer uses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from peft import LoraConfig, VeraConfig
from safetensors.torch import save_file
from torch import Tensor

from inlay.errors import InlayError
from inlay.methods.folder import CONFIG, WEIGHTS, sort_sets
from inlay.methods.mixture.unmixable import OTHERWISE
from inlay.methods.plain import WRAPPED

LARGEST = 1e5  # a rank or a scale beyond it is nobody's
Sizes = Callable[[str], tuple[int, int]]
A, B, D, SMALL_B = "base_model.vera_A", "base_model.vera_B", ".vera_lambda_d", ".vera_lambda_b"


def copy_lora(config: LoraConfig, tensors: dict[str, Tensor], folder: Path, sizes: Sizes) -> None:
    """Write a saved LoRA as it is, of any rank and scale (rsLoRA's too); one that is no low-rank product is refused."""
    for setting, why in OTHERWISE.items():
        if getattr(config, setting, None):
            raise InlayError(f"This adapter is no plain LoRA: {why}. Use it where PEFT loads it.")
    for name in ("r", "lora_alpha"):
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LARGEST:
            raise InlayError(
                f"This adapter has {name}={value!r}: a number above 0, and up to {LARGEST:g}, is expected."
            )
    config.inference_mode = True
    _write(config, {name: tensor.contiguous() for name, tensor in tensors.items()}, folder)


def vera_to_lora(config: VeraConfig, tensors: dict[str, Tensor], folder: Path, sizes: Sizes) -> None:
    """Write a saved VeRA as a LoRA of the same rank. `sizes` gives the inputs and outputs of the base model's modules:
    which part of the shared matrices a layer uses."""
    if A not in tensors or B not in tensors:
        raise InlayError(
            "The shared matrices of this VeRA are not in its file (save_projection=False), and PEFT may draw others "
            "elsewhere. Train it with save_projection=True, which is the default."
        )
    if config.bias != "none":
        raise InlayError(
            f"This VeRA trains biases of the base model (bias={config.bias!r}), which no low-rank product is."
        )
    made = {name: tensor for name, tensor in tensors.items() if name not in (A, B) and D not in name}
    targets = []
    for name in [name for name in tensors if name.endswith(D)]:
        stem = name.removesuffix(D)
        plain = stem.removeprefix(WRAPPED)
        inputs, outputs = sizes(plain)
        b = made.pop(f"{stem}{SMALL_B}")
        if len(b) != outputs or tensors[A].shape[1] < inputs or tensors[B].shape[0] < outputs:
            raise InlayError(
                f"{plain} has {inputs} inputs and {outputs} outputs in the base model, and the adapter was trained on "
                f"{len(b)} outputs and at most {tensors[A].shape[1]} inputs: it belongs to another model."
            )
        made[f"{stem}.lora_A.weight"] = tensors[name].unsqueeze(1) * tensors[A][:, :inputs]
        made[f"{stem}.lora_B.weight"] = b.unsqueeze(1) * tensors[B][:outputs]
        targets.append(plain)
    if not targets:
        raise InlayError("The file holds no trained vectors of a VeRA: there is nothing to write.")
    written = LoraConfig(
        r=config.r,
        lora_alpha=config.r,  # a scale of one
        lora_dropout=config.vera_dropout,
        target_modules=sorted(targets),
        modules_to_save=config.modules_to_save,
        fan_in_fan_out=config.fan_in_fan_out,
        task_type=config.task_type,
        inference_mode=True,
        base_model_name_or_path=config.base_model_name_or_path,
        revision=config.revision,
    )
    _write(written, made, folder)


def _write(config: LoraConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    save_file(tensors, folder / WEIGHTS["peft"], metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    sort_sets(folder / CONFIG["peft"])
