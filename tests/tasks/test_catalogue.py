"""The catalogue: complete, consistent, found by any of its names, and light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inlay import tasks
from inlay.errors import InlayError
from inlay.tasks import catalogue, kinds, metrics, prepare, templates

GLUE = ["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "mnli-mm", "qnli", "rte", "wnli"]
SUPERGLUE = ["boolq", "cb", "copa", "multirc", "wic", "wsc"]
# Table A1 of the activation-prompt paper, as printed there; repeated rows once.
PRINTED = [
    "Flowers102", "DTD", "UCF101", "Food101", "SVHN", "GTSRB", "EuroSAT", "OxfordPets", "StanfordCars", "SUN397",
    "CIFAR10", "CIFAR100", "CUB-200-2011", "NA-Birds", "StanfordDog", "OxfordFlowers", "Waterbirds", "Caltech101",
    "Camelyon", "Resisc45", "Retinopathy", "Clevr/count", "Clevr/distance", "DMLab", "KITTI/distance",
    "dSprites/location", "dSprites/orientation", "SmallNORB/azimuth", "SmallNORB/elevation",
]  # fmt: skip
OTHERS = [
    "semeval2010", "wnut17", "wnut17-spans", "conll2003", "conll2003-spans", "ace2005", "e2e", "webnlg", "dart",
    "wikitext2", "wikitext103", "ptb", "lambada", "gsm8k", "math", "metamathqa", "tiny-imagenet", "fashion-mnist",
    "hymenoptera", "dtd10", "rotten-tomatoes", "bbc-news", "digits", "mnli-small", "sst2-sentences",
]  # fmt: skip


@pytest.mark.parametrize("name", [*GLUE, *SUPERGLUE, *OTHERS])
def test_the_named_tasks_are_there(name: str) -> None:
    assert tasks.describe(name).name == name


def test_the_29_image_sets_are_there_under_their_printed_names() -> None:
    cards = {tasks.describe(name).name for name in PRINTED}
    assert len(cards) == 29
    assert all(tasks.describe(name).kind == kinds.IMAGES for name in PRINTED)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("semeval2010_task8", "semeval2010"),
        ("sst2_sentences", "sst2-sentences"),
        ("e2e_nlg", "e2e"),
        ("webnlg2017", "webnlg"),
        ("oxford_pets", "oxford-pets"),
        ("fashion_mnist", "fashion-mnist"),
        ("mnli_small", "mnli-small"),
        ("SST-2", "sst2"),
        ("flowers102", "flowers102"),
        ("Patch Camelyon", "camelyon"),
    ],
)
def test_other_names_lead_to_the_task(alias: str, name: str) -> None:
    assert tasks.describe(alias).name == name
    assert tasks.canonical(alias) == name
    assert tasks.is_named(alias)


@pytest.mark.parametrize("name", ["owner/name", "owner/Name:config", "stanfordnlp/sst2", "nonsense", ""])
def test_names_that_the_catalogue_lacks_are_left_alone(name: str) -> None:
    assert tasks.canonical(name) == name
    assert not tasks.is_named(name)


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(InlayError, match=r"Unknown task 'rotten-tomato'. Did you mean 'rotten-tomatoes'.*--data"):
        tasks.describe("rotten-tomato")


def test_a_task_that_is_not_offered_says_why() -> None:
    with pytest.raises(InlayError, match="not offered: ReCoRD ranks"):
        tasks.describe("record")


@pytest.mark.parametrize("name", tasks.names())
def test_a_card_is_consistent(name: str) -> None:
    card = tasks.describe(name)
    assert card.summary
    assert not card.summary.endswith(".")
    assert set(card.metrics) <= set(metrics.ALL)
    assert card.hub or card.installed or card.local, "there must be a source, or a reason why not"
    assert card.schema.prepare is None or card.schema.prepare in prepare.PREPARE
    assert set(prepare.PREPARE) == set(prepare.INPUTS)
    if card.kind not in (kinds.IMAGES, kinds.TOKENS):
        templates.check(card.schema.template or templates.default(card.fields), card.fields)
    if card.kind in kinds.ONE_LABEL:
        assert card.num_labels is not None or card.local
    if card.schema.label_names:
        assert len(set(card.schema.label_names)) == len(card.schema.label_names) == card.num_labels
    if card.kind == kinds.CAUSAL_LM:
        assert (card.schema.lm is None) == (card.target is not None)


def test_no_two_tasks_share_a_name() -> None:
    every = [catalogue.fold(each) for name in tasks.names() for each in (name, *tasks.describe(name).aliases)]
    assert not {each for each in every if every.count(each) > 1}


def test_looking_at_the_catalogue_imports_nothing_heavy() -> None:
    code = (
        "import sys; from inlay import tasks; tasks.describe('rte'); tasks.names();"
        "print([m for m in ('torch', 'datasets', 'transformers', 'numpy', 'pandas', 'sklearn') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
