"""The in-context learning lab on real things: a frozen backbone's features as f, and a language model's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inlay.errors import InlayError
from inlay.papers.icl.theory.language import Answerer
from inlay.papers.icl.theory.problem import InContextProblem
from inlay.papers.icl.theory.setting import InContextSetting
from inlay.records.spec import Spec
from inlay.workflow.explain.models import NO_METHOD, batch_examples, draw_examples, load_subject


def real_problem(model: str, task: str, setting: InContextSetting, data_dir: str | None = None) -> InContextProblem:
    """K training examples of a task: what enters a backbone's first block are the tokens `v_k`, what leaves its last
    one (the mean over places) is `f(v_k)`.

    Both are taken to their first d and m principal components, of variance 1, so that the noise tau means the same as
    with a Gaussian representation.
    """
    wanted = 20 if setting.m is None else setting.m
    first, last = features(model, task, setting.K, setting.seed, data_dir)
    tokens = components(first, min(setting.d, len(first) - 1, first.shape[1]))
    if setting.unit:
        tokens = tokens / tokens.norm(dim=1, keepdim=True)
    return InContextProblem.of(tokens, components(last, wanted), setting.N, setting.tau).to(setting.device)


def components(values: Tensor, count: int) -> Tensor:
    """The first `count` principal components of the rows, each of mean 0 and variance 1."""
    values = values.to(torch.float64)
    values = values - values.mean(0)
    if not 1 <= count < min(len(values), values.shape[1] + 1):
        raise InlayError(
            f"{count} components of {len(values)} examples with {values.shape[1]} features: give 1 to "
            f"{min(len(values) - 1, values.shape[1])}."
        )
    left, sizes, _ = torch.linalg.svd(values, full_matrices=False)
    if float(sizes[count - 1]) <= 1e-9 * float(sizes[0]):
        raise InlayError(
            f"The features of these examples have fewer than {count} independent directions: lower m (or d)."
        )
    return left[:, :count] * len(values) ** 0.5


@torch.no_grad()
def features(model: str, task: str, count: int, seed: int, data_dir: str | None = None) -> tuple[Tensor, Tensor]:
    """What enters the first block and what leaves the last one, a row each for `count` training examples.

    `data_dir`: a folder with local copies of named tasks.
    """
    from inlay.explain.features import rows_of
    from inlay.training.batches import Placement

    spec = Spec(
        model=model,
        method=NO_METHOD,
        task=task,
        data_dir=data_dir,
        seed=seed,
        precision="float32",
        batch_size=50,
    )
    found = draw_examples(spec, "train", count, smallest=count)
    one = load_subject(model, found, spec)
    parts, place = one.parts, Placement.of(spec)
    seen: dict[str, list[Tensor]] = {"first": [], "last": []}
    mask: Tensor | None = None

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        # Pictures by their places; texts, whose places hold other words in every example, by the mean.
        how = "flat" if parts.modality == "image" else "mean"
        seen["first"].append(rows_of(values, parts.kind, how, mask).cpu())

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        values = output if isinstance(output, Tensor) else output[0]
        seen["last"].append(rows_of(values, parts.kind, "mean", mask).cpu())

    hooks = [
        parts.blocks[0].module.register_forward_pre_hook(before, with_kwargs=True),
        parts.blocks[-1].module.register_forward_hook(after),
    ]
    try:
        for batch in batch_examples(one, found, "train", spec, place):
            mask = batch.get("attention_mask")
            one.model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(seen["first"]), torch.cat(seen["last"])


def language_model(name: str, batch: int = 4, device: str = "cpu") -> Answerer:
    """A causal language model's probabilities of 00 to 99: the first digit's, times the second's after it."""
    from inlay.backbones.loading import load
    from inlay.tasks import kinds

    backbone = load(name, kind=kinds.CAUSAL_LM)
    model, tokenizer = backbone.model.eval().to(device), backbone.processor
    digits = [tokenizer.encode(str(digit), add_special_tokens=False) for digit in range(10)]
    if any(len(ids) != 1 for ids in digits):
        raise InlayError(f"{name}: its tokenizer does not write a digit as one token. Choose a model whose does.")
    ids_of = torch.tensor([ids[0] for ids in digits], device=device)

    @torch.no_grad()
    def answer(texts: Sequence[str]) -> Tensor:
        found = []
        for start in range(0, len(texts), batch):
            rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts[start : start + batch]]
            if len({len(row) for row in rows}) > 1:
                raise InlayError(
                    f"{name}: its tokenizer joins digits, and answers are read digit by digit. Choose another."
                )
            seen = model(torch.tensor(rows, device=device), use_cache=True)
            first = seen.logits[:, -1].softmax(-1)[:, ids_of]  # (b, 10)
            cache = seen.past_key_values
            cache.batch_repeat_interleave(10)
            after = model(ids_of.repeat(len(rows))[:, None], past_key_values=cache, use_cache=True)
            second = after.logits[:, -1].softmax(-1)[:, ids_of].view(len(rows), 10, 10)
            found.append((first[..., None] * second).flatten(1).cpu())
        return torch.cat(found)

    return answer
