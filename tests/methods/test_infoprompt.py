"""InfoPrompt, WARP and IDPG: where prompts stand, what they are made of, what the losses reach, and what is kept."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

import inlay
from inlay.errors import InlayError
from inlay.frozen import promise_of, unchanging
from inlay.methods.attach import attach, trained_parameters
from inlay.methods.infoprompt.layer import InfoPromptLayer
from inlay.methods.infoprompt.model import usual_state
from inlay.methods.infoprompt.pieces import Pieces, ScaledParameter
from inlay.methods.infoprompt.slots import Slots, read, usual_places, within
from zoo import BOS, EOS, PAD, ROW_LENGTHS, VOCABULARY, tiny

ENCODERS = ("bert", "roberta", "distilbert", "electra", "modernbert", "mpnet", "deberta-v2")
DECODERS = ("gpt2", "opt", "llama", "gemma")
MASK = VOCABULARY - 1


def made(family: str, task: str = "classification", **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = tiny(family, task)  # type: ignore[arg-type]
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == MASK, MASK - 1)
    return get_peft_model(model, inlay.InfoPromptConfig(**settings)).eval(), batch


def layer_of(model: Any) -> InfoPromptLayer:
    return next(module for module in model.modules() if isinstance(module, InfoPromptLayer))


def pieces_of(model: Any) -> Pieces:
    return layer_of(model).inlay_infoprompt_pieces["default"]


def masked(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with a mask in place of every row's second token."""
    ids = batch["input_ids"].clone()
    ids[:, 1] = MASK
    return batch | {"input_ids": ids}


class Seen:
    """What enters the encoder's first block and the word embeddings, and the last prompts."""

    def __init__(self, model: Any) -> None:
        layer = layer_of(model)
        self.prompts: list[Tensor] = []
        self.ids: list[Tensor] = []
        self.embedded: list[Tensor] = []
        site = pieces_of(model).site
        site.embeddings.register_forward_hook(self._note)
        self._layer = layer

    def _note(self, module: Any, args: Any, output: Tensor) -> None:
        self.ids.append(args[0])
        self.embedded.append(output)
        if self._layer._pass is not None:
            self.prompts.append(self._layer._pass.prompts)


# ------------------------------------------------------------------------------------------------------- where


def test_places_of_prompts_as_the_paper_has_them() -> None:
    real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
    masks = torch.tensor([3, 2])
    four = Slots.inserted(usual_places(real, masks, 4, causal=False), 6)
    assert four.prompts.tolist() == [[1, 4, 6, 8], [1, 3, 5, 6]]
    one = Slots.inserted(usual_places(real, masks, 1, causal=False), 6)
    assert one.prompts.tolist() == [[3], [2]], "one stands before the mask"
    mean = Slots.inserted(usual_places(real, None, 2, causal=False), 6)
    assert mean.prompts.tolist() == [[1, 6], [1, 4]], "without a mask at both ends"
    causal = Slots.inserted(usual_places(real, None, 2, causal=True), 6)
    assert causal.prompts.tolist() == [[1, 2], [1, 2]], "in a causal model after the first token"
    alone = Slots.inserted(usual_places(real[:1, :1], None, 2, causal=True), 1)
    assert alone.prompts.tolist() == [[1, 2]], "after the first, where there is no other"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_slots_keep_every_token_in_order(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    where = torch.randint(0, 8, (3, count), generator=generator)
    slots = Slots.inserted(where, 7)
    values = torch.arange(21).reshape(3, 7)
    spread = slots.spread(values, -1)
    assert (spread == -1).sum(1).tolist() == [count] * 3
    assert torch.equal(slots.without(spread), values)
    positions = slots.positions(torch.arange(7).unsqueeze(0))
    assert torch.equal(positions, torch.arange(7 + count).expand(3, -1))
    prompts = torch.randn(3, count, 2)
    put = slots.put(prompts, torch.zeros(3, 7 + count, 2))
    assert torch.equal(put[torch.arange(3).unsqueeze(1), slots.prompts], prompts)
    assert float(slots.without(put).abs().sum()) == 0
    given = Slots.of(spread == -1, count)
    assert torch.equal(given.tokens, slots.tokens)
    assert torch.equal(given.prompts, slots.prompts)
    following = torch.cat([values, values[:, -1:]], 1).gather(1, where.sort(dim=1).values)
    assert torch.equal(slots.like_the_next(values).gather(1, slots.prompts), following)


def test_states_are_read_where_they_should_be() -> None:
    states = torch.arange(8.0).reshape(2, 4, 1)
    real = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]).bool()
    assert read(states, real, "first").flatten().tolist() == [0, 5]
    assert read(states, real, "last").flatten().tolist() == [2, 7]
    assert read(states, real, "mean").flatten().tolist() == [1, 6]
    assert read(states, real, "mask", torch.tensor([2, 1])).flatten().tolist() == [2, 5]


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_a_given_vector_at_a_place_is_what_the_token_there_would_be(family: str) -> None:
    """Static prompts that are the embeddings of tokens: the model computes what it does with those tokens in the text.

    Position ids, token types and attention masks therefore follow the inserted tokens, in every architecture; and
    words start as large as they are in the text, also where a model scales its embeddings.
    """
    causal = family in DECODERS
    words = {"initial": "words", "initial_ids": [11, 12, 13, 14]}
    model, batch = made(family, encoder="static", beta=0.0, gamma=0.0, mask_token_id=None if causal else MASK, **words)
    batch = batch if causal else masked(batch)
    texts = [row[:length].tolist() for row, length in zip(batch["input_ids"], ROW_LENGTHS, strict=True)]
    if causal:
        with_words = [[row[0], 11, 12, 13, 14, *row[1:]] for row in texts]
    else:
        with_words = [[row[0], 11, 12, row[1], 13, *row[2:-1], 14, row[-1]] for row in texts]
    wide = torch.full((3, max(map(len, with_words))), PAD)
    for i, row in enumerate(with_words):
        wide[i, : len(row)] = torch.tensor(row)
    base = model.get_base_model()
    encoder = layer_of(model).host
    with torch.no_grad():
        found = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        with model.disable_adapter():
            states = encoder(input_ids=wide, attention_mask=(wide != PAD).long())[0]
    theta = pieces_of(model).theta()
    at = [len(row) - 1 if causal else row.index(MASK) for row in with_words]
    torch.testing.assert_close(found, states[range(3), at] @ theta.T, atol=1e-5, rtol=1e-5)
    assert base.config.num_labels == found.shape[1]


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
def test_places_in_the_ids_are_the_same_as_places_that_are_found(family: str) -> None:
    causal = family == "gpt2"
    settings = {"mask_token_id": None if causal else MASK, "num_prompt_tokens": 4}
    found, batch = made(family, **settings)
    given, _ = made(family, placeholders=True, **settings)
    given.load_state_dict(found.state_dict())
    batch = batch if causal else masked(batch)
    rows = []
    for row, length in zip(batch["input_ids"].tolist(), ROW_LENGTHS, strict=True):
        text, padding = row[:length], row[length:]
        if causal:
            rows.append([text[0], -1, -2, -3, -4, *text[1:], *padding])
        else:
            rows.append([text[0], -1, -2, text[1], -3, *text[2:-1], -4, text[-1], *padding])
    ids = torch.tensor(rows)
    plain = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        wanted = found(**plain).logits
        logits = given(input_ids=ids, attention_mask=(ids != PAD).long()).logits
    torch.testing.assert_close(logits, wanted, atol=1e-6, rtol=1e-6)
    with pytest.raises(InlayError, match="should have 4"):
        given(**plain)
    with pytest.raises(InlayError, match="placeholders=True"):
        found(input_ids=ids)


def test_positions_and_token_types_that_are_given_move_with_the_tokens() -> None:
    model, batch = made("bert")
    plain = {k: v for k, v in batch.items() if k != "labels"}
    types = torch.zeros_like(batch["input_ids"])
    positions = torch.arange(types.shape[1]).expand_as(types)
    with torch.no_grad():
        wanted = model(**plain).logits
        found = model(**plain, token_type_ids=types, position_ids=positions).logits
        other = model(**plain, token_type_ids=1 - types).logits
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(other, wanted)


def test_prompts_have_the_segment_of_the_token_after_them() -> None:
    """A pair of texts, with prompts in both of its segments, against the same words in the text."""
    words = {"initial": "words", "initial_ids": [11, 12, 13, 14]}
    model, _ = made("bert", encoder="static", beta=0.0, gamma=0.0, mask_token_id=MASK, **words)
    text, types = torch.tensor([[BOS, 20, MASK, 21, EOS, 22, 23, EOS]]), torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    written = torch.tensor([[BOS, 11, 20, 12, MASK, 13, 21, EOS, 22, 23, 14, EOS]])
    segments = torch.tensor([[0] * 8 + [1] * 4])
    with torch.no_grad():
        found = model(input_ids=text, token_type_ids=types).logits
        with model.disable_adapter():
            states = layer_of(model).host(input_ids=written, token_type_ids=segments)[0]
            other = layer_of(model).host(input_ids=written)[0]
    theta = pieces_of(model).theta()
    torch.testing.assert_close(found, states[:, 4] @ theta.T, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, other[:, 4] @ theta.T, atol=1e-5), "the segments count"


def test_left_padding_changes_nothing_in_roberta() -> None:
    model, batch = made("roberta")
    row, length = batch["input_ids"][1:2], ROW_LENGTHS[1]
    with torch.no_grad():
        right = model(input_ids=row, attention_mask=(row != PAD).long()).logits
        left = row.roll(row.shape[1] - length, 1)
        moved = model(input_ids=left, attention_mask=(left != PAD).long()).logits
    torch.testing.assert_close(moved, right, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------- each its own


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("encoder", ["per-token", "shared-bottleneck"])
def test_each_example_gets_its_own_prompt(family: str, encoder: str) -> None:
    """The released code gave every example of a batch the first one's."""
    model, batch = made(family, encoder=encoder)
    seen = Seen(model)
    with torch.no_grad():
        model(**batch)
        together = seen.prompts[-1]
        assert together.shape[:2] == (3, 4)
        assert all(not torch.allclose(together[0], together[i]) for i in (1, 2))
        for i in range(3):
            model(**{k: v[i : i + 1] for k, v in batch.items()})
            torch.testing.assert_close(seen.prompts[-1][0], together[i], atol=1e-5, rtol=1e-5)


def test_prompts_are_what_the_equation_says() -> None:
    model, batch = made("bert", num_prompt_tokens=2, bottleneck=3)
    seen = Seen(model)
    host = layer_of(model).host
    with torch.no_grad():
        model(**batch)
        phi = host(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0][:, 0]
    encoder: Any = pieces_of(model).prompts
    for i in range(2):
        wanted = phi @ encoder.down()[i].T @ encoder.up()[i].T
        torch.testing.assert_close(seen.prompts[0][:, i], wanted, atol=1e-5, rtol=1e-5)
    nonlinear, _ = made("bert", num_prompt_tokens=2, bottleneck=3, encoder="shared-bottleneck")
    idpg: Any = pieces_of(nonlinear).prompts
    idpg.down_bias.weight.data.fill_(0.3)
    idpg.up_bias.weight.data.fill_(0.2 * idpg.up_bias.times)
    inner = torch.nn.functional.gelu(phi @ idpg.down()[0].T + 0.3)
    wanted = torch.stack([inner @ idpg.up()[i].T + 0.2 for i in range(2)], 1)
    torch.testing.assert_close(idpg(phi, 3), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["bert", "electra", "llama", "gemma"])
@pytest.mark.parametrize("factor", [0.1, 1.0, 30.0])
def test_prompts_start_as_large_as_words_and_scores_of_size_one(family: str, factor: float) -> None:
    torch.manual_seed(0)
    model, batch = tiny(family, "classification")  # type: ignore[arg-type]
    last = [module for module in model.modules() if "Norm" in type(module).__name__][-1]
    last.weight.data.fill_(factor)
    if getattr(last, "bias", None) is not None:  # a norm's weight alone does not say how large states come out
        last.bias.data.normal_(std=10 * factor)
    model = get_peft_model(model, inlay.InfoPromptConfig(mask_token_id=MASK)).eval()
    seen, (pieces, layer) = Seen(model), (pieces_of(model), layer_of(model))
    with layer.observing() as noted, torch.no_grad():
        model(**masked(batch))
        spread = float(pieces.site.embeddings(torch.arange(VOCABULARY)).std())  # as they come out
        assert 0.3 * spread < float(seen.prompts[-1].square().mean().sqrt()) < 3 * spread
        assert pieces.critic is not None
        mean, _ = pieces.critic(noted.z[0])
        assert 0.3 < float(mean.square().mean().sqrt()) < 3
        prompts = noted.prompts[0] @ pieces.critic.w2()
        assert 0.3 < float(prompts.square().mean().sqrt()) < 3


@pytest.mark.parametrize("settings", [{"encoder": "static"}, {}, {"encoder": "shared-bottleneck"}])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_step_is_the_same_in_models_of_any_size(settings: dict[str, Any], factor: float) -> None:
    """With embeddings and states `factor` times as large, prompts move `factor` times as far, class vectors less."""
    moved = []
    for size in (1.0, factor):
        torch.manual_seed(0)
        model, batch = tiny("bert", "classification")
        last = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)][-1]
        for parameter in (model.get_input_embeddings().weight, last.weight, last.bias):
            parameter.data.mul_(size)
        model = get_peft_model(model, inlay.InfoPromptConfig(mask_token_id=MASK, beta=0, gamma=0, **settings)).eval()
        pieces, layer = pieces_of(model), layer_of(model)
        optimizer = torch.optim.Adam(trained_parameters(model).values(), lr=0.01)
        for _ in range(2):
            with layer.observing() as seen:
                model(**masked(batch)).loss.backward()
            moved.append((seen.prompts[0], pieces.theta().detach().clone()))
            optimizer.step()
    (p1, t1), (p2, t2), (q1, u1), (q2, u2) = moved
    words = float(pieces.site.table.std()) / factor
    assert 0.001 * words < float((p2 - p1).abs().mean()) < 0.1 * words
    prompts = float((q2 - q1).abs().mean()) / float((p2 - p1).abs().mean())
    vectors = float((u2 - u1).abs().mean()) / float((t2 - t1).abs().mean())
    assert 0.2 < prompts / factor < 5, "in the unit of embeddings"
    assert 0.2 < vectors * factor < 5, "what states are multiplied with"


@pytest.mark.parametrize("encoder", ["static", "per-token", "shared-bottleneck"])
def test_plain_numbers_start_the_same_and_the_critics_of_them_plainly(encoder: str) -> None:
    (plain, _), (model, batch) = (
        made("bert", mask_token_id=MASK, encoder=encoder, units=units) for units in (False, True)
    )
    ours, theirs = pieces_of(plain), pieces_of(model)
    for part in ("prompts", "theta", "w1"):
        for one, other in zip(getattr(ours, part).modules(), getattr(theirs, part).modules(), strict=True):
            if isinstance(one, ScaledParameter) and isinstance(other, ScaledParameter):
                assert one.times == 1
                torch.testing.assert_close(one.weight, other.weight / other.times)
    assert ours.critic is not None
    for matrix in (ours.critic.mean.matrix, ours.critic.w2):
        assert torch.equal(matrix.weight, torch.eye(len(matrix.weight)))
    with torch.no_grad():
        torch.testing.assert_close(plain(**masked(batch)).logits, model(**masked(batch)).logits)


def test_the_critics_of_a_loaded_adapter_are_those_that_were_saved(tmp_path: Path) -> None:
    model, _ = made("bert", mask_token_id=MASK)
    before = pieces_of(model)
    assert before.critic is not None
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    again, _ = tiny("bert", "classification")
    for parameter in again.parameters():  # another model gives other sizes: what was saved counts
        parameter.data.mul_(1.5)
    after = pieces_of(PeftModel.from_pretrained(again, tmp_path))
    assert after.critic is not None
    assert torch.equal(after.critic.w2(), before.critic.w2())
    z = torch.randn(2, before.site.hidden_size)
    assert torch.equal(after.critic(z)[0], before.critic(z)[0])


def test_static_prompts_start_from_words_the_vocabulary_or_numbers() -> None:
    table = tiny("bert")[0].get_input_embeddings().weight
    given, _ = made("bert", encoder="static", initial="words", initial_ids=[5, 6])
    torch.testing.assert_close(pieces_of(given).prompts(None, 1)[0], table[[5, 6, 5, 6]])
    drawn, _ = made("bert", encoder="static", initial="vocabulary")
    assert all(any(torch.allclose(p, word) for word in table) for p in pieces_of(drawn).prompts(None, 1)[0])
    uniform, _ = made("bert", encoder="static", initial="uniform")
    largest = float(pieces_of(uniform).prompts(None, 1).detach().abs().max())
    assert largest <= 3**0.5 * float(table.detach().std()) + 1e-6


def test_class_vectors_start_from_words_and_of_several_tokens_from_their_mean() -> None:
    model, _ = made("bert", label_ids=[[5], [6, 8], [7]])
    table = model.get_base_model().get_input_embeddings().weight
    wanted = torch.stack([table[5], (table[6] + table[8]) / 2, table[7]])
    torch.testing.assert_close(pieces_of(model).theta(), wanted)
    narrow, _ = made("electra", label_ids=[[5], [6], [7]])  # embeddings are shorter than states there
    assert pieces_of(narrow).theta.weight.shape == (3, 16)


# ------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("task_type", [None, "SEQ_CLS"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "llama"])
def test_losses_are_part_of_the_loss_in_training_and_absent_in_evaluation(family: str, task_type: str | None) -> None:
    model, batch = made(family, task_type=task_type)
    layer = layer_of(model)
    out = model(**batch)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, batch["labels"]))
    assert layer.loss_parts == {}
    frozen(model)
    torch.manual_seed(0)
    out = model(**batch)
    parts = layer.loss_parts
    assert list(parts) == ["task", "head", "representation"]
    torch.testing.assert_close(out.loss, parts["task"] + 0.05 * parts["head"] + 0.1 * parts["representation"])
    torch.testing.assert_close(parts["task"], torch.nn.functional.cross_entropy(out.logits, batch["labels"]))
    assert model(**{k: v for k, v in batch.items() if k != "labels"}).loss is None
    torch.manual_seed(0)
    share = model(**batch, num_items_in_batch=torch.tensor(12)).loss
    torch.testing.assert_close(share, out.loss / 4, msg="as a Trainer that accumulates expects it")
    as_tuple = model(**batch, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert as_tuple[1].shape == out.logits.shape


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"beta": 0.0}, ["task", "head"]),
        ({"gamma": 0.0}, ["task", "representation"]),
        ({"beta": 0.0, "gamma": 0.0}, ["task"]),
    ],
)
def test_a_loss_of_no_weight_has_no_parameters(settings: dict[str, float], names: list[str]) -> None:
    model, batch = made("bert", **settings)
    model.train()(**batch).loss.backward()
    assert list(layer_of(model).loss_parts) == names
    assert (pieces_of(model).critic is None) == ("representation" not in names)
    assert (pieces_of(model).w1 is None) == ("head" not in names)
    assert all(p.grad is not None for p in trained_parameters(model).values())


def test_no_label_and_no_padding_enter_the_information_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    from inlay.methods.infoprompt import losses

    model, batch = made("bert", num_negatives=50)
    drawn: list[Tensor] = []
    take = losses.sample_context

    def noted(embedded: Tensor, usable: Tensor, count: int, *args: Any) -> Any:
        drawn.append(usable)
        return take(embedded, usable, count, *args)

    monkeypatch.setattr(losses, "sample_context", noted)
    found = []
    for labels in (batch["labels"], 2 - batch["labels"]):
        torch.manual_seed(0)
        model.train()(**batch | {"labels": labels})
        found.append(dict(layer_of(model).loss_parts))
    assert found[0]["task"] != found[1]["task"]
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("head", "representation"))
    special = {PAD, BOS, EOS}
    ordinary = [sum(int(t) not in special for t in row) for row in batch["input_ids"]]
    assert drawn[0].sum(1).tolist() == ordinary, "neither padding, special tokens nor prompts"


def test_the_ends_of_a_text_are_no_negatives_where_nobody_named_the_special_tokens() -> None:
    """BERT's config names neither [CLS] nor [SEP]."""
    ids = torch.tensor([[5, 6, 9, 7, 8, PAD, PAD]])
    slots = Slots.inserted(torch.tensor([[1]]), 7)
    for given, wanted in ((None, [0, 0, 1, 1, 1, 0, 0, 0]), ([9], [1, 0, 1, 0, 1, 1, 0, 0])):
        model, _ = made("bert", special_token_ids=given)
        usable = layer_of(model).train()._usable(pieces_of(model), slots, ids, ids != PAD)
        assert usable is not None
        assert usable[0].int().tolist() == wanted
    for length in (1, 2):  # nothing is left of those
        assert not within(torch.ones(1, length).bool()).any()


def test_a_tokenizer_says_which_tokens_are_special(text_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(text_model)
    config = inlay.InfoPromptConfig.for_tokenizer(tokenizer, num_prompt_tokens=2)
    assert config.num_prompt_tokens == 2
    assert config.mask_token_id == tokenizer.mask_token_id
    assert config.special_token_ids == sorted(tokenizer.all_special_ids)


def test_options_as_released() -> None:
    model, batch = made("bert", detach_prompts=True, predict_from_sample=True, kl_weight=0.1, gamma=0.0)
    torch.manual_seed(0)
    model.train()(**batch).loss.backward()
    assert list(layer_of(model).loss_parts) == ["task", "representation", "kl"]
    assert pieces_of(model).critic.mean.matrix.weight.grad.abs().sum() > 0  # type: ignore[union-attr]


def test_a_model_that_is_trained_on_samples_predicts_from_their_mean() -> None:
    """Z itself, which the class vectors never saw, is another vector: f_mu is trained."""
    model, batch = made("bert", predict_from_sample=True)
    pieces, layer = pieces_of(model), layer_of(model)
    assert pieces.critic is not None
    with torch.no_grad():
        pieces.critic.mean.matrix.weight.add_(torch.randn_like(pieces.critic.mean.matrix.weight))
        with layer.observing() as seen:
            logits = model(**batch).logits
        mean = seen.z[0] @ pieces.critic.mean.matrix().T + pieces.critic.mean.bias()
        torch.testing.assert_close(logits, mean @ pieces.theta().T)
        assert not torch.allclose(logits, seen.z[0] @ pieces.theta().T, atol=1e-2)
        sampled = torch.stack([frozen(model)(**batch).logits for _ in range(400)])
    assert float(sampled.std(0).min()) > 0
    error = sampled.std(0) / 400**0.5
    assert float(((sampled.mean(0) - logits).abs() / error).max()) < 5, "the mean of what it is trained on"
    with pytest.raises(InlayError, match="a class for every token"):
        made("bert", "token-classification", predict_from_sample=True)


def test_prompts_that_are_detached_hear_nothing_of_the_representation_loss_itself() -> None:
    """It reaches them by way of Z alone; here Z is detached too."""
    grown = []
    for detach in (False, True):
        model, batch = made("bert", encoder="static", detach_prompts=detach, gamma=0.0, beta=1.0)
        pieces = pieces_of(model)

        def cut(module: Any, args: Any, output: Any) -> None:
            output.last_hidden_state = output.last_hidden_state.detach()

        layer_of(model).host.register_forward_hook(cut, prepend=True)
        frozen(model)(**batch).loss.backward()
        grad = pieces.prompts.weight.grad
        grown.append(0.0 if grad is None else float(grad.abs().sum()))
    assert grown[0] > 0
    assert grown[1] == 0


def test_the_model_s_own_head_is_neither_trained_nor_saved(tmp_path: Any) -> None:
    for task_type in (None, "SEQ_CLS"):
        model, _ = made("roberta", task_type=task_type)
        assert all("inlay_infoprompt" in name for name in trained_parameters(model))
        model.save_pretrained(tmp_path)
        assert all("inlay_infoprompt_pieces" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_regression_and_several_labels_have_their_losses() -> None:
    model, batch = made("bert")
    base = model.get_base_model()
    base.config.problem_type = "multi_label_classification"
    out = model(**batch | {"labels": torch.ones(3, 3)})
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(out.logits, torch.ones(3, 3))
    torch.testing.assert_close(out.loss, wanted)
    torch.manual_seed(0)
    single, batch = tiny("bert", num_labels=1)
    single = get_peft_model(single, inlay.InfoPromptConfig()).eval()
    out = single(**batch | {"labels": torch.tensor([0.5, 1.0, 2.0])})
    torch.testing.assert_close(out.loss, ((out.logits[:, 0] - torch.tensor([0.5, 1.0, 2.0])) ** 2).mean())
    whole = single.train()(**batch | {"labels": torch.tensor([0, 1, 2])})
    whole.loss.backward()
    assert float(pieces_of(single).theta.weight.grad.abs().sum()) > 0, "labels that are whole numbers"


def test_tokens_are_classified_with_prompts_among_them() -> None:
    model, batch = made("bert", "token-classification")
    out = model.train()(**batch)
    assert out.logits.shape == (3, batch["input_ids"].shape[1], 3)
    out.loss.backward()
    assert list(layer_of(model).loss_parts) == ["task", "head", "representation"]
    typed, _ = made("bert", "token-classification", task_type="TOKEN_CLS")
    assert typed(**batch).logits.shape == out.logits.shape


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_every_prompt_acts_on_the_classes_of_tokens(family: str, count: int) -> None:
    """In a decoder no token sees what comes after it."""
    model, batch = made(family, "token-classification", num_prompt_tokens=count, encoder="static", beta=0.0, gamma=0.0)
    model.train()(**batch).loss.backward()
    assert (pieces_of(model).prompts.weight.grad.abs().sum(1) > 0).all()


# ------------------------------------------------------------------------------------------------------- Phi(X)


def frozen(model: Any) -> Any:
    """As `tune` runs it: what is frozen in eval mode."""
    mine = set(layer_of(model).modules())
    for module in model.modules():
        module.training = module in mine
    return model


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_with_the_cache_it_is_the_same_to_the_bit(family: str) -> None:
    """Texts in other company and other padding, over three epochs."""
    found = []
    for cache in (True, False):
        model, batch = made(family, cache=cache, mask_token_id=MASK if family == "bert" else None)
        batch = masked(batch)
        optimizer = torch.optim.SGD(trained_parameters(model).values(), lr=0.1)
        torch.manual_seed(1)
        for rows in ([0, 1], [2], [1, 2], [0], [2, 0, 1]):
            width = max(ROW_LENGTHS[i] for i in rows)
            part = {k: v[rows] if v.ndim == 1 else v[rows, :width] for k, v in batch.items()}
            optimizer.zero_grad()
            frozen(model)(**part).loss.backward()
            optimizer.step()
        with torch.no_grad():
            found.append(model.eval()(**batch).logits)
        assert pieces_of(model).cache.computed == (3 if cache else 0)
        assert len(pieces_of(model).cache) == (3 if cache else 0)
    assert torch.equal(found[0], found[1])


def test_nothing_is_kept_that_could_change() -> None:
    model, batch = made("bert")
    cache = pieces_of(model).cache
    frozen(model)(**batch)
    assert len(cache) == 3
    with torch.no_grad():
        before = model(**batch).logits
        next(layer_of(model).host.parameters()).mul_(1.5)
        after = model(**batch).logits
    assert cache.computed == 6
    fresh, _ = made("bert")
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh(**batch).logits, after)
    assert not torch.equal(after, before)
    model.train()(**batch)  # dropout in the encoder
    assert cache.computed == 6
    twin = copy.deepcopy(model)
    assert len(pieces_of(twin).cache) == 0


def test_under_a_promise_the_encoder_is_looked_at_once_and_after_it_again() -> None:
    model, batch = made("bert")
    cache, host = pieces_of(model).cache, layer_of(model).host
    frozen(model)
    with unchanging(model), torch.no_grad():
        before = model(**batch).logits
        next(host.parameters()).mul_(1.5)  # which breaks the promise
        model(**batch)
        assert (cache.computed, cache.recalled) == (3, 3)
        assert promise_of(copy.deepcopy(host)) is None, "of this model, not of copies"
    with torch.no_grad():
        assert not torch.equal(model(**batch).logits, before)
    assert cache.computed == 6
    with unchanging(model), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(**batch)
    assert cache.computed == 9, "autocast is looked at every time"
    assert promise_of(host) is None


def test_a_cache_that_is_full_takes_no_more() -> None:
    model, batch = made("bert")
    cache = pieces_of(model).cache
    cache.most_bytes = 2 * 16 * 4 * 2  # two rows of Phi and Z'
    frozen(model)(**batch)
    assert len(cache) == 2


def test_beside_a_lora_nothing_is_kept() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model, batch = made("bert")
    inject_adapter_in_model(LoraConfig(target_modules=["query"]), layer_of(model).host, adapter_name="low")
    frozen(model)(**batch)
    assert len(pieces_of(model).cache) == 0


# ---------------------------------------------------------------------------------------------------- defaults


def test_z_is_read_where_it_fits_the_backbone() -> None:
    class Loaded:
        architectures = ("RobertaForMaskedLM",)

    class SentenceEncoder:
        architectures = ("BertModel",)

    class Built:
        architectures = None

    assert usual_state(Loaded, 5, causal=False) == "mask"
    assert usual_state(SentenceEncoder, 5, causal=False) == "mean"
    assert usual_state(Built, 5, causal=False) == "mask"
    assert usual_state(Loaded, None, causal=False) == "mean"
    assert usual_state(Built, None, causal=True) == "last"


def test_a_sentence_encoder_that_was_saved_as_a_masked_language_model_is_read_at_its_mean(tmp_path: Path) -> None:
    class Loaded:
        architectures = ("MPNetForMaskedLM",)
        _name_or_path = str(tmp_path)

    assert usual_state(Loaded, 5, causal=False) == "mask"
    (tmp_path / "modules.json").write_text("[]")
    assert usual_state(Loaded, 5, causal=False) == "mean"
    Loaded._name_or_path = "sentence-transformers/all-mpnet-base-v2"
    assert usual_state(Loaded, 5, causal=False) == "mean"
    for name in ("", "roberta-base", "no/name/of a model"):
        Loaded._name_or_path = name
        assert usual_state(Loaded, 5, causal=False) == "mask"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"state": "mask"}, "needs mask_token_id"),
        ({"state": "middle"}, "state"),
        ({"num_prompt_tokens": 0}, "at least 1"),
        ({"num_negatives": 1}, "at least 2"),
        ({"beta": -1.0}, "must not be negative"),
        ({"encoder": "deep"}, "encoder"),
        ({"initial": "words"}, "initial_ids"),
        ({"predict_from_sample": True, "beta": 0.0}, "beta above 0"),
        ({"mask_token_id": 4096}, "no token of BertForSequenceClassification"),
        ({"label_ids": [[1], [2]]}, "a word a class"),
        ({"cache": "no"}, "true or false"),
    ],
)
def test_bad_settings_are_refused_in_words(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InlayError, match=words):
        made("bert", **settings)


def test_bad_input_is_refused_in_words() -> None:
    model, batch = made("bert", mask_token_id=MASK)
    with pytest.raises(InlayError, match="Row 0 of the batch has no mask token"):
        model(**batch)
    with pytest.raises(InlayError, match="not inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 3, 16))
    with pytest.raises(InlayError, match="B x L"):
        model(input_ids=batch["input_ids"], attention_mask=torch.ones(3, 1, 9, 9))


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2", "opt"])
def test_a_text_that_leaves_no_room_for_prompts_is_refused_in_words(family: str) -> None:
    model, _ = made(family)
    longest = pieces_of(model).site.longest
    assert longest is not None
    ids = torch.full((1, longest - 4), 7)
    assert model(input_ids=ids).logits.isfinite().all()
    with pytest.raises(InlayError, match=f"{longest - 3} tokens and 4 prompts .* max_length={longest - 4}"):
        model(input_ids=torch.full((1, longest - 3), 7))


def test_where_positions_are_computed_there_is_no_longest_text() -> None:
    for family in ("llama", "gemma", "modernbert"):
        assert pieces_of(made(family)[0]).site.longest is None


def test_what_does_not_fit_is_refused() -> None:
    for family, task, words in (
        ("vit", "classification", "reads images"),
        ("t5", "classification", "neither a mask token"),
        ("gpt2", "causal-lm", "a model that classifies"),
    ):
        model, _ = tiny(family, task)  # type: ignore[arg-type]
        with pytest.raises(InlayError, match=words):
            attach(model, "infoprompt", force=True)
