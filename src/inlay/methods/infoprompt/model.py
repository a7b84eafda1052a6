"""The tuner of InfoPrompt (Wu et al. 2023), WARP and IDPG: prompts in the text of a classifier."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from inlay.anatomy import anatomy
from inlay.backbones.pooled import installed, paused
from inlay.errors import InlayError
from inlay.methods.capabilities import alternatives
from inlay.methods.infoprompt.config import InfoPromptConfig
from inlay.methods.infoprompt.layer import InfoPromptLayer
from inlay.methods.infoprompt.pieces import Site, embedded
from inlay.methods.infoprompt.slots import read
from inlay.methods.plain import base_of, plain_name
from inlay.methods.tuner import InlayTuner

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
POOLING = "modules.json"  # by which sentence-transformers says how states become a sentence's vector
TEXTS, WORDS = 8, 8  # on which the size of states is seen


class InfoPromptModel(InlayTuner):
    """`get_peft_model(model, InfoPromptConfig())` makes one of these."""

    prefix = "inlay_infoprompt_"
    child = "inlay_infoprompt"
    tuner_layer_cls = InfoPromptLayer

    def hosts(self, config: InfoPromptConfig) -> list[str]:
        return [plain_name(anatomy(self.model).backbone.name)] if why_not(self.model) is None else []

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        peft_config = super()._prepare_adapter_config(peft_config, model_config)
        # Class vectors stand in place of the head: a new one is neither read, trained nor saved.
        new = peft_config.newly_initialised or ()
        peft_config.modules_to_save = [name for name in peft_config.modules_to_save if name not in new]
        parts, base = anatomy(self.model), base_of(self.model)
        causal = parts.kind == "decoder"
        if peft_config.state is None:
            peft_config.state = installed(base) or usual_state(base.config, peft_config.mask_token_id, causal=causal)
        if peft_config.phi is None:
            peft_config.phi = "last" if causal else "first"
        if peft_config.pad_token_id is None:
            peft_config.pad_token_id = getattr(base.config, "pad_token_id", None)
        _check(peft_config, base)
        if peft_config.sizes is None:
            peft_config.sizes = self._sizes(peft_config)
        return peft_config

    def settings_at(self, config: InfoPromptConfig, name: str) -> Site:
        parts, base = anatomy(self.model), base_of(self.model)
        embeddings = base.get_input_embeddings()
        assert config.state is not None
        assert config.phi is not None
        return Site(
            config=config,
            root=base,
            embeddings=embeddings.get_base_layer() if isinstance(embeddings, BaseTunerLayer) else embeddings,
            hidden_size=parts.hidden_size,
            labels=base.config.num_labels,
            causal=parts.kind == "decoder",
            state=config.state,
            phi=config.phi,
            per_token=type(base).__name__.endswith(CLASSIFIERS[1]),
            longest=_longest(parts.backbone.module, base.config),
        )

    @torch.no_grad()
    def _sizes(self, config: InfoPromptConfig) -> list[float]:
        """How large the entries of word embeddings, of `Phi(X)` and of Z are.

        States are looked at on a few texts of words from all over the vocabulary: the last norm's scales, from which
        one might guess, can be three times as large as what comes out. A model without values says 1.
        """
        host, embeddings = anatomy(self.model).backbone.module, base_of(self.model).get_input_embeddings()
        table = embeddings.weight
        if table.is_meta:
            return [1.0, 1.0, 1.0]
        ids = torch.arange(TEXTS * WORDS, device=table.device) * (len(table) // (TEXTS * WORDS)) % len(table)
        ids = ids.reshape(WORDS, TEXTS).T.contiguous()
        if config.mask_token_id is not None:
            ids[:, WORDS // 2] = config.mask_token_id
        everywhere, masks = torch.ones_like(ids), torch.full((TEXTS,), WORDS // 2, device=ids.device)
        modes = [(module, module.training) for module in host.modules()]
        try:
            with paused(host):
                states = host.eval()(input_ids=ids, attention_mask=everywhere)[0].float()
        finally:
            for module, mode in modes:
                module.training = mode
        found = (read(states, everywhere.bool(), how, masks) for how in (config.phi, config.state) if how)
        scale = embedded(embeddings, ids).float().norm() / table[ids].float().norm()  # 1, but for Gemma's kind
        sizes = [float(table.float().std() * scale), *(float(each.square().mean().sqrt()) for each in found)]
        return [size if math.isfinite(size) and size > 0 else 1.0 for size in sizes]

    @classmethod
    def refusal(cls, model: nn.Module) -> str:
        """Models of images, of two parts, and those that do not classify."""
        return f"Prompts in the text do not fit {type(base_of(model)).__name__}: {why_not(model)}. " + alternatives(
            base_of(model), "infoprompt"
        )


def why_not(model: nn.Module) -> str | None:
    """Why a model cannot have prompts in its text and class vectors on its state; None if it can."""
    base = base_of(model)
    parts = anatomy(model)
    if parts.modality != "text":
        return "it reads images"
    if parts.family == "t5":
        return "it has neither a mask token nor is it a decoder alone"
    if not type(base).__name__.endswith(CLASSIFIERS):
        return f"class vectors need a model that classifies, {' or '.join(f'a {name}' for name in CLASSIFIERS)}"
    return None


def usual_state(config: Any, mask_token_id: int | None, *, causal: bool) -> str:
    """Where Z is read where no pooling was chosen for the heads of all methods (`inlay.backbones.pooled`).

    At the mask, where the checkpoint was trained to fill masks. A sentence encoder carries little there: the mean. It
    is known by its checkpoint, which has the body alone, or by what sentence-transformers puts beside it: many were
    saved as the masked language models that they were made of. A model that was not loaded says nothing: at the mask,
    if that is known.
    """
    if causal:
        return "last"
    origin = list(getattr(config, "architectures", None) or ())
    fills = any("MaskedLM" in name or name == "BertForPreTraining" for name in origin)
    known = mask_token_id is not None and not encodes_sentences(getattr(config, "_name_or_path", "") or "")
    return "mask" if known and (fills or not origin) else "mean"


def encodes_sentences(name: str) -> bool:
    """Whether a model's folder or repository is one of sentence-transformers."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if name.startswith("sentence-transformers/") or (Path(name) / POOLING).is_file():
        return bool(name)
    try:
        return isinstance(try_to_load_from_cache(name, POOLING), str)
    except HFValidationError:  # a path that is no name
        return False


def _longest(encoder: nn.Module, config: Any) -> int | None:
    """How many positions a model has a table for; None where they are computed."""
    from inlay.tasks.encode import length_limit

    tables = (name for name, module in encoder.named_modules() if isinstance(module, nn.Embedding))
    return length_limit(None, config) if any("position" in name or name.endswith("wpe") for name in tables) else None


def _check(config: InfoPromptConfig, base: Any) -> None:
    rows = base.get_input_embeddings().weight.shape[0]
    for name in ("mask_token_id", "pad_token_id"):
        token = getattr(config, name)
        if token is not None and not 0 <= token < rows:
            raise InlayError(f"{name}={token} is no token of {type(base).__name__}, which has {rows}: 0 to {rows - 1}.")
    if config.predict_from_sample and type(base).__name__.endswith(CLASSIFIERS[1]):
        raise InlayError(
            f"predict_from_sample=True: {type(base).__name__} has a class for every token, and the sample is of one "
            "state a text. Leave it out."
        )
    if config.label_ids is not None and len(config.label_ids) != base.config.num_labels:
        raise InlayError(
            f"There are {len(config.label_ids)} label words and {base.config.num_labels} classes: give a word a class."
        )
