"""Train vectors of texts: what belongs together comes close, and everything else in the batch goes away.

For B anchors a_i with their positives c_i, and C >= B candidates c_j (all positives and negatives of the batch):

    L = -1/B sum_i log( exp(cos(a_i, c_i) / t) / sum_{j in N_i + {i}} exp(cos(a_i, c_j) / t) )

N_i are the candidates that are not known to belong to a_i (InfoNCE, or multiple-negatives ranking). Of pairs with
scores y, whose cosines are s (CoSENT):

    L = log(1 + sum_{y_i < y_j} exp((s_i - s_j) / t))

Each process, and each part of an accumulated batch, has the negatives of its own rows. Images and texts are compared by
their model's own loss (`inlay.backbones.towers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import Task
from inlay.tasks.encode import IGNORED
from inlay.training.objectives import SingleTask
from inlay.training.plan import Plan

if TYPE_CHECKING:
    from inlay.training.trainer import InlayTrainer

TEMPERATURE = 0.05


def in_batch_loss(vectors: Tensor, relations: Tensor, temperature: float) -> Tensor:
    """L of vectors of length 1: B anchors, then C candidates; `relations` is B x C, see `inlay.tasks.pairs`."""
    anchors, candidates = vectors[: len(relations)], vectors[len(relations) :]
    cosines = anchors @ candidates.T / temperature
    cosines = cosines.masked_fill(relations == IGNORED, -torch.inf)
    return cross_entropy(cosines, torch.arange(len(relations), device=vectors.device))


def ranking_loss(vectors: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """L of vectors of length 1: the first texts of B pairs, then the second ones; `scores` are B."""
    cosines = (vectors[: len(scores)] * vectors[len(scores) :]).sum(-1) / temperature
    gaps = cosines[:, None] - cosines[None, :]
    ordered = gaps[scores[:, None] < scores[None, :]]
    return torch.logsumexp(torch.cat([ordered.new_zeros(1), ordered]), 0)


class InBatch(SingleTask):
    """What is learnt from the other rows of the same batch."""

    def check(self, spec: Spec, plan: Plan) -> Plan:
        plan = super().check(spec, plan)
        if plan.micro_batch < 2 and len(self.first.fields) == 2:
            raise InlayError(
                f"Each part of a batch has {plan.micro_batch} pair (batch_size={spec.batch_size}, "
                f"gradient_accumulation={spec.gradient_accumulation}), which leaves nothing to tell apart: the other "
                "pairs of the part are what it learns from. Give a larger batch_size, or less gradient_accumulation."
            )
        return plan

    def count_rows(self, batch: dict[str, Any]) -> int:
        return len(batch["labels"])

    def _items(self, batch: dict[str, Any]) -> Tensor:
        return torch.tensor(len(batch["labels"]), device=batch["labels"].device)


class Contrast(InBatch):
    """Texts that belong together on one model, by one of the losses above."""

    def __init__(self, task: Task, spec: Spec) -> None:
        super().__init__(task)
        self.temperature = TEMPERATURE if spec.similarity_temperature is None else spec.similarity_temperature

    def begin(self, trainer: InlayTrainer) -> None:
        super().begin(trainer)
        self._loss = ranking_loss if self.first.schema.scored else in_batch_loss

    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        texts = {name: value for name, value in batch.items() if name != "labels"}
        return self._loss(model(**texts)["logits"].float(), batch["labels"], self.temperature)
