"""A task at work: encoded, batched, through a model, decoded and scored; and its schema in a fresh place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertForTokenClassification

from inlay import tasks, training
from inlay.errors import InlayError
from inlay.records.spec import Spec
from inlay.tasks import TaskSchema, kinds

Write = Callable[[str, str], Path]
MakeSpec = Callable[..., Spec]


@pytest.fixture
def moods(write: Write, spec: MakeSpec) -> tasks.Task:
    """Sixty texts of two classes, six of them long."""
    lines = [f"the cat {i} {'sat ' * (100 if i % 10 == 3 else 1)},{('glad', 'sad')[i % 2]}" for i in range(60)]
    return tasks.load(spec(data=write("moods.csv", "text,label\n" + "\n".join(lines))))


# -------------------------------------------------------------------------------------------------- classification


def test_encoding_is_the_same_every_time_and_says_what_was_cut(moods: tasks.Task, wordpiece: Any) -> None:
    made = [moods.encode("train", wordpiece, 32) for _ in range(2)]
    assert len(made[0]) == len(moods.train)
    assert [made[0][i] for i in range(len(made[0]))] == [made[1][i] for i in range(len(made[1]))]
    assert [made[0][i]["labels"] for i in range(len(made[0]))] == list(moods.train["label"])
    cut = [note for note in made[0].notes if "were cut" in note]
    long = sum(len(text) > 200 for text in moods.train["text"])
    assert cut == [f"{long} of {len(made[0])} train texts are longer than 32 tokens and were cut"]
    assert moods.with_length(wordpiece, 32).schema.max_length == 32
    assert moods.schema.max_length is None, "a task never changes"


def test_a_length_beyond_the_model_is_brought_down_and_said(moods: tasks.Task, wordpiece: Any) -> None:
    config = SimpleNamespace(model_type="bert", max_position_embeddings=24)
    made = moods.encode("train", wordpiece, 1000, model_config=config)
    assert max(len(made[i]["input_ids"]) for i in range(len(made))) == 24
    note = "max_length=1000 is more than the model reads: 24 is used"
    assert note in made.notes
    settled = moods.with_length(wordpiece, 1000, model_config=config)
    assert settled.notes == (*moods.notes, note)
    assert settled.schema.max_length == 24
    assert note not in settled.encode("test", wordpiece, model_config=config).notes


def test_an_unknown_split_is_refused(moods: tasks.Task, wordpiece: Any) -> None:
    with pytest.raises(InlayError, match="Unknown split 'dev'"):
        moods.encode("dev", wordpiece)


def test_the_trainer_trains_and_scores_on_it(moods: tasks.Task, wordpiece: Any, tmp_path: Path) -> None:
    """The real thing: Transformers' Trainer with our data set, collator, metrics and reduction of logits."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(wordpiece), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=moods.num_labels,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True),
        train_dataset=moods.encode("train", wordpiece, model_config=config),
        data_collator=moods.collator(wordpiece, model),
        compute_metrics=lambda output: moods.compute_metrics(output.predictions, output.label_ids),
        preprocess_logits_for_metrics=moods.reduce_logits,
    )
    trainer.train()
    test = moods.encode("test", wordpiece, model_config=config)
    output = trainer.predict(test)
    said = moods.decode(output.predictions)
    right = [one["label"] == moods.label_names[row["label"]] for one, row in zip(said, moods.test, strict=True)]
    assert output.metrics["test_accuracy"] == pytest.approx(np.mean(right))
    assert all(0.5 <= one["score"] <= 1 for one in said)
    # The same rows without labels give the same predictions.
    rows = [{"text": text} for text in moods.test["text"]]
    again = trainer.predict(moods.encode_inputs(rows, wordpiece))
    np.testing.assert_allclose(again.predictions, output.predictions, atol=1e-6)


# --------------------------------------------------------------------------------------------------------- schema


def test_the_schema_survives_json(moods: tasks.Task, wordpiece: Any) -> None:
    moods = moods.with_length(wordpiece, 32)
    text = json.dumps(moods.to_json())
    assert TaskSchema.from_json(json.loads(text)) == moods.schema
    with pytest.raises(InlayError, match="has format 99; this version of inlay reads up to 1"):
        TaskSchema.from_json(json.loads(text) | {"format": 99})
    with pytest.raises(InlayError, match="Unknown field of a task's description 'colour'"):
        TaskSchema.from_json(json.loads(text) | {"colour": 1})


def test_new_rows_are_read_with_the_columns_of_training(moods: tasks.Task, write: Write) -> None:
    schema = TaskSchema.from_json(moods.to_json())
    rows = schema.read_inputs(write("new.csv", "id,text,label\n1,hello,unheard-of\n2,,\n"))
    assert rows == [{"text": "hello"}, {"text": ""}], "labels are ignored, an empty text is kept"
    assert schema.read_inputs(write("new.jsonl", '{"text": "a"}\n{"text": ""}\n')) == [{"text": "a"}, {"text": ""}]
    for nothing in ('{"text": NaN}', '{"text": null}', '{"id": 1}'):
        with pytest.raises(InlayError, match=r"'new\.jsonl', row 2: 'text' is missing \(null or NaN\)"):
            schema.read_inputs(write("new.jsonl", f'{{"text": "a"}}\n{nothing}\n'))
    assert schema.read_inputs(write("na.csv", "text\nNA\n")) == [{"text": "NA"}]
    with pytest.raises(InlayError, match=r"lacks the column 'text' that the model was trained on \(columns: body\)"):
        schema.read_inputs(write("bad.csv", "body\nx\n"))
    split = schema.read_inputs(write("split.csv", "text,split\na,test\nb,train\nc,test\n"))
    assert [row["text"] for row in split] == ["a", "b", "c"], "in the order of the file, whatever its columns"
    with pytest.raises(InlayError, match="is a folder; give a table"):
        schema.read_inputs(write("folder/x.csv", "text\nx\n").parent)


def test_empty_texts_are_predicted_like_any_other(moods: tasks.Task, wordpiece: Any, byte_level: Any) -> None:
    for tokenizer in (wordpiece, byte_level):
        made = moods.encode_inputs([{"text": ""}, {"text": "the"}], tokenizer)
        batch = moods.collator(tokenizer)([made[0], made[1]])
        assert batch["attention_mask"].sum(1).min() >= 1


# ---------------------------------------------------------------------------------------------------------- values


def test_values_are_learnt_scaled_and_predicted_unscaled(write: Write, spec: MakeSpec, wordpiece: Any) -> None:
    text = "text,price\n" + "".join(f"house {i},{250000 + 1000.5 * i}\n" for i in range(60))
    task = tasks.load(spec(data=write("houses.csv", text), label="price"))
    made = task.encode("train", wordpiece)
    scaled = np.array([made[i]["labels"] for i in range(len(made))])
    assert scaled.mean() == pytest.approx(0, abs=1e-9)
    assert scaled.std() == pytest.approx(1)
    assert task.collator(wordpiece)([made[0]])["labels"].dtype == torch.float32
    said = task.decode(scaled[:, None])
    assert [one["value"] for one in said] == pytest.approx(list(task.train["label"]))
    perfect = task.compute_metrics(scaled[:, None], scaled)
    assert perfect["pearson"] == pytest.approx(1)
    off = task.compute_metrics(scaled[:, None] + 1, scaled)
    assert off["mse"] == pytest.approx(task.schema.deviation**2)


def test_a_named_regression_keeps_its_scale(tmp_path: Path, spec: MakeSpec, wordpiece: Any) -> None:
    rows = [json.dumps({"sentence1": f"a {i}", "sentence2": "b", "label": i % 6 * 1.0}) for i in range(30)]
    (tmp_path / "stsb").mkdir()
    (tmp_path / "stsb" / "train.jsonl").write_text("\n".join(rows))
    task = tasks.load(spec(task="stsb", data_dir=tmp_path))
    made = task.encode("test", wordpiece)
    assert [made[i]["labels"] for i in range(len(made))] == list(task.test["label"])


# ----------------------------------------------------------------------------------------------------------- words


@pytest.fixture
def names(write: Write, spec: MakeSpec) -> tasks.Task:
    rows = [{"tokens": ["Paris", "is", "unbelievable", str(i)], "tags": ["B-LOC", "O", "O", "O"]} for i in range(30)]
    return tasks.load(spec(data=write("ner.jsonl", "\n".join(map(json.dumps, rows)))))


@pytest.mark.parametrize("virtual", [0, 3])
def test_tags_come_back_to_words(names: tasks.Task, wordpiece: Any, byte_level: Any, virtual: int) -> None:
    for tokenizer in (wordpiece, byte_level):
        test = names.encode("test", tokenizer)
        batch = names.collator(tokenizer)([test[i] for i in range(len(test))])
        labels = batch["labels"].numpy()
        assert (labels != -100).sum() == 4 * len(test)
        # A perfect model; prompt-tuned ones put logits of their virtual tokens first.
        logits = np.eye(2)[np.where(labels < 0, 1, labels)]
        logits = np.concatenate([np.zeros((len(test), virtual, 2)), logits], axis=1)
        assert names.compute_metrics(logits, labels)["entity-f1"] == 1.0
        inputs = names.encode_inputs([{"tokens": row["tokens"]} for row in names.test], tokenizer)
        said = names.decode(logits, inputs)
        assert [one["tags"] for one in said] == [["B-LOC", "O", "O", "O"]] * len(test)
    with pytest.raises(InlayError, match="pass the encoded inputs"):
        names.decode(logits)


class Oracle(BertForTokenClassification):
    """A model that knows the tag of every token that it reads."""

    def forward(self, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        logits = torch.nn.functional.one_hot(torch.where(labels < 0, 1, labels), 2).float()
        return {"loss": torch.zeros(()), "logits": logits}


def test_words_beyond_the_cut_are_scored_and_tagged(write: Write, spec: MakeSpec, wordpiece: Any) -> None:
    """A perfect model that reads half the names finds half the names, and everything it says is right."""
    words, tags = ["Paris", *["the"] * 30, "Rome"], ["B-LOC", *["O"] * 30, "B-LOC"]
    rows = [{"tokens": [*words, str(i)], "tags": [*tags, "O"]} for i in range(30)]
    task = tasks.load(spec(data=write("ner.jsonl", "\n".join(map(json.dumps, rows)))))
    test = task.encode("test", wordpiece, 16)
    labels = task.collator(wordpiece)([test[i] for i in range(len(test))])["labels"].numpy()
    logits = np.eye(2)[np.where(labels < 0, 1, labels)]
    virtual = np.concatenate([np.zeros((len(test), 3, 2)), logits], axis=1)
    for predictions in (logits, virtual):
        found = task.compute_metrics(predictions, labels, test)
        assert found == {"entity-f1": pytest.approx(2 / 3), "entity-precision": 1.0, "entity-recall": 0.5}
    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=99, num_labels=2
    )
    at_once, _ = training.evaluate(Oracle(config), task, "test", wordpiece, spec(task="wnut17", max_length=16))
    assert at_once["entity-recall"] == 0.5
    inputs = task.encode_inputs([{"tokens": row["tokens"]} for row in task.test], wordpiece, 16)
    assert [one["tags"] for one in task.decode(logits, inputs)] == [["B-LOC", *["O"] * 32]] * len(test)


def test_words_beyond_the_cut_are_wrong_where_no_tag_means_nothing(
    write: Write, spec: MakeSpec, wordpiece: Any
) -> None:
    rows = [{"tokens": ["the"] * 30 + [str(i)], "tags": ["DET"] * 30 + ["NUM"]} for i in range(30)]
    task = tasks.load(spec(data=write("pos.jsonl", "\n".join(map(json.dumps, rows)))))
    test = task.encode("test", wordpiece, 12)
    labels = task.collator(wordpiece)([test[i] for i in range(len(test))])["labels"].numpy()
    logits = np.eye(2)[np.where(labels < 0, 0, labels)]
    assert task.compute_metrics(logits, labels, test) == {"token-accuracy": pytest.approx(10 / 31)}


def test_sentences_to_tag_may_be_plain_text(names: tasks.Task, write: Write) -> None:
    assert names.read_inputs(write("new.csv", "tokens\nAnn saw Rome\n\n")) == [{"tokens": ["Ann", "saw", "Rome"]}]


def test_spans_to_type_are_prepared_as_in_training(write: Write, spec: MakeSpec) -> None:
    rows = [{"words": ["in", "Rome", str(i)], "start": 1, "end": 2, "label": "ab"[i % 2]} for i in range(20)]
    task = tasks.load(spec(data=write("a.jsonl", "\n".join(map(json.dumps, rows))), text=("words",)))
    new = write("new.jsonl", json.dumps({"words": ["to", "Paris"], "start": 1, "end": 2}))
    assert task.read_inputs(new) == [{"text": "to [ Paris ]", "span": "Paris", "start": 3, "end": 12}]
    with pytest.raises(InlayError, match=r"new2.jsonl', row 1: A span from word 5 to 6"):
        task.read_inputs(write("new2.jsonl", json.dumps({"words": ["to"], "start": 5, "end": 6})))
    with pytest.raises(InlayError, match=r"needs the columns 'tokens', 'start', 'end' or 'text', 'start', 'end'"):
        task.read_inputs(write("new3.jsonl", json.dumps({"words": ["to"]})))


def test_spans_to_type_may_stand_in_words_or_in_a_text_row_by_row(write: Write, spec: MakeSpec) -> None:
    rows = [{"tokens": ["in", "Rome", str(i)], "start": 1, "end": 2, "label": "ab"[i % 2]} for i in range(20)]
    task = tasks.load(spec(data=write("a.jsonl", "\n".join(map(json.dumps, rows)))))
    paris = {"text": "to [ Paris ]", "span": "Paris", "start": 3, "end": 12}
    given = [
        {"tokens": ["to", "Paris"], "start": 1, "end": 2},
        {"text": "to Paris", "start": 3, "end": 8},
        {"tokens": "to Paris", "start": 1, "end": 2},  # a text, not its letters
    ]
    mixed = write("mixed.jsonl", "\n".join(map(json.dumps, given)))
    assert task.read_inputs(mixed) == [paris] * 3
    neither = write("neither.jsonl", "\n".join(map(json.dumps, [*given, {"start": 3, "end": 8}])))
    with pytest.raises(InlayError, match=r"neither.jsonl', row 4: it needs the columns .* \(it has start, end\)"):
        task.read_inputs(neither)


# -------------------------------------------------------------------------------------------------- language models


def uniform(shape: tuple[int, ...], vocabulary: int) -> torch.Tensor:
    return torch.zeros(*shape, vocabulary)


def test_perplexity_against_the_models_own_loss(write: Write, spec: MakeSpec, byte_level: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    lines = "\n".join(f"the cat {i} sat on the mat" for i in range(60))
    task = tasks.load(spec(data=write("book.txt", lines), kind="causal-lm"))
    test = task.encode("test", byte_level, 32)
    batch = task.collator(byte_level)([test[i] for i in range(len(test))])
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(byte_level), n_embd=16, n_layer=1, n_head=2, n_positions=64)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        output = model(**batch)
    reduced = task.reduce_logits(output.logits, batch["labels"])
    assert reduced.shape == (len(test), 3)
    found = task.compute_metrics(reduced.numpy(), batch["labels"].numpy())
    assert found["perplexity"] == pytest.approx(math.exp(output.loss.item()), rel=1e-4)
    # Logits of virtual tokens ahead of the text's change nothing.
    ahead = torch.cat([torch.randn(len(test), 4, len(byte_level)), output.logits], dim=1)
    assert torch.equal(task.reduce_logits(ahead, batch["labels"]), reduced)


def test_the_last_word(tmp_path: Path, spec: MakeSpec, byte_level: Any) -> None:
    folder = tmp_path / "lambada"
    folder.mkdir()
    text = "".join(json.dumps({"text": f"the cat sat on the {word}"}) + "\n" for word in ("mat", "unbelievable"))
    (folder / "test.jsonl").write_text(text)
    task = tasks.load(spec(task="lambada", data_dir=tmp_path), need_train=False)
    made = task.encode("test", byte_level)
    learnt = [[label for label in made[i]["labels"] if label != -100] for i in range(2)]
    assert [byte_level.decode(ids) for ids in learnt] == [" mat", " unbelievable"]
    labels = task.collator(byte_level)([made[0], made[1]])["labels"]
    logits = torch.nn.functional.one_hot(labels.clamp(min=0).roll(-1, 1), len(byte_level)).float() * 50
    assert task.compute_metrics(task.reduce_logits(logits, labels), labels) == {
        "perplexity": pytest.approx(1.0),
        "last-word-accuracy": 1.0,
    }
    blank = task.compute_metrics(task.reduce_logits(uniform(labels.shape, len(byte_level)), labels), labels)
    assert blank["perplexity"] == pytest.approx(len(byte_level), rel=1e-3)
    assert blank["last-word-accuracy"] == 0.0


def test_answers_are_generated_and_matched(tmp_path: Path, spec: MakeSpec, byte_level: Any) -> None:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    rows = [{"question": f"what is {i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(40)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = tasks.load(spec(task="gsm8k", data_dir=tmp_path))
    assert task.generates
    assert (task.selection_metric, task.greater_is_better()) == ("perplexity", False)
    prompts = task.encode_inputs(list(task.test), byte_level, 400)
    assert byte_level.decode(prompts[0]["input_ids"]).startswith("Question: what is ")
    assert byte_level.decode(prompts[0]["input_ids"]).endswith("?\nAnswer:")
    assert "labels" not in prompts[0]
    batch = task.collator(byte_level, generation=True)([prompts[0], prompts[1]])
    assert (batch["attention_mask"][:, -1] == 1).all()
    texts = [f"so it is {2 * int(row['question'].split()[2])}." for row in task.test]
    assert task.score_texts(texts, task.test) == {"answer-accuracy": 1.0}
    assert task.score_texts(["7.5"] * len(texts), task.test) == {"answer-accuracy": 0.0}
    assert task.decode([" some text\n"]) == [{"text": "some text"}]
    (tmp_path / "new.txt").write_text("what is 3?\nwhat is 4?\n")
    assert task.read_inputs(tmp_path / "new.txt") == [{"question": "what is 3?"}, {"question": "what is 4?"}]


def test_texts_from_data_are_scored_against_all_references(tmp_path: Path, spec: MakeSpec, byte_level: Any) -> None:
    folder = tmp_path / "e2e_nlg"
    folder.mkdir()
    rows = [
        {
            "meaning_representation": f"name[Blue {i // 2}], area[city centre]",
            "human_reference": f"Blue {i // 2} is one {i}",
        }
        for i in range(40)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = tasks.load(spec(task="e2e", data_dir=tmp_path))
    assert task.test[0]["source"].endswith(" | area : city centre")
    assert [len(found) for found in task.test["references"]] == [2] * len(task.test)
    second = [found[1] for found in task.test["references"]]
    assert task.score_texts(second, task.test)["bleu"] == pytest.approx(100)
    made = task.encode("train", byte_level)
    assert byte_level.decode([i for i in made[0]["labels"] if i != -100]) == f" {task.train[0]['target']}<|end|>"
    new = tmp_path / "new.jsonl"
    new.write_text(json.dumps({"meaning_representation": "name[Red], food[Thai]"}))
    assert task.read_inputs(new) == [{"source": "name : Red | food : Thai"}]


# --------------------------------------------------------------------------------------------------------- images


def test_pictures_to_predict(tmp_path: Path, spec: MakeSpec, processor: Any) -> None:
    for i in range(24):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (i * 10, 0, 0)).save(path)
    task = tasks.load(spec(data=tmp_path / "photos"))
    schema = TaskSchema.from_json(task.to_json())
    rows = schema.read_inputs(tmp_path / "photos")
    assert len(rows) == 24
    made = schema.encode_inputs(rows, processor)
    assert set(made[0]) == {"pixel_values"}
    assert schema.read_inputs(tmp_path / "photos" / "a" / "0.png") == [{"image": str(tmp_path / "photos/a/0.png")}]
    (tmp_path / "list.csv").write_text("image\nphotos/a/0.png\n")
    assert schema.read_inputs(tmp_path / "list.csv") == [{"image": str(tmp_path / "photos/a/0.png")}]
    (tmp_path / "photos" / "bad.jpg").write_text("x")
    with pytest.raises(InlayError, match=r"1 image of 25 cannot be read.*bad\.jpg"):
        schema.encode_inputs(schema.read_inputs(tmp_path / "photos"), processor)
    (tmp_path / "none").mkdir()
    with pytest.raises(InlayError, match="There is no image in"):
        schema.read_inputs(tmp_path / "none")
    assert schema.decode(np.array([[2.0, 0.0]]))[0] == {"label": "a", "score": pytest.approx(1 / (1 + math.exp(-2)))}
    assert (schema.modality, schema.num_labels, kinds.modality(kinds.TOKENS)) == ("image", 2, "text")
