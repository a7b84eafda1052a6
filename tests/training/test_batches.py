"""Long texts in batches: the order that puts them together, and the note on one that makes its batch very wide."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import inlay
from inlay import InlayError, Spec
from inlay.training.batches import describe_outlier
from inlay.training.objectives import EpochSampler


def padded(order: list[int], lengths: np.ndarray, batch: int) -> int:
    """How many tokens are computed with this order."""
    parts = [order[start : start + batch] for start in range(0, len(order), batch)]
    return sum(len(part) * int(max(lengths[part])) for part in parts)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=90), st.integers(1, 9), st.integers(0, 9), st.integers(0, 3))
def test_every_row_once_and_less_is_padded(lengths: list[int], batch: int, seed: int, epoch: int) -> None:
    sizes = np.array(lengths)
    grouped, plain = EpochSampler(len(sizes), seed, sizes, batch), EpochSampler(len(sizes), seed)
    grouped.epoch = plain.epoch = epoch
    order = list(grouped)
    assert sorted(order) == list(range(len(sizes)))
    assert order == list(grouped), "it follows from the seed and the epoch"
    whole = len(sizes) - len(sizes) % batch
    assert sorted(order[whole:]) == sorted(list(plain)[whole:]), "the rest of an epoch is the same rows"
    assert padded(order[:whole], sizes, batch) <= padded(list(plain)[:whole], sizes, batch)


def test_without_lengths_the_order_is_what_it_always_was() -> None:
    sampler = EpochSampler(7, 3)
    sampler.epoch = 2
    assert list(sampler) == torch.randperm(7, generator=torch.Generator().manual_seed(3 * 1_000_003 + 2)).tolist()


def test_one_long_text_among_short_ones_is_told_with_what_would_be_cut() -> None:
    lengths = np.array([10] * 98 + [40, 512])
    said = describe_outlier(lengths, range(100), 8)
    assert said is not None
    assert "has 512 tokens" in said
    assert "about 51 times the memory" in said
    assert "--max-length 48 would cut 1 of 100 texts" in said
    assert describe_outlier(np.array([10, 30, 20, 39] * 20), range(80), 8) is None


@pytest.fixture
def uneven(review_spec: Spec, tmp_path: Path) -> Spec:
    """Reviews of one word each, but for a long one."""
    with (tmp_path / "reviews.csv").open() as file:
        head, *rows = csv.reader(file)
    rows = [[number, f"w{stars}", stars] for number, _, stars in rows]
    rows[6][1] = " ".join(["w1"] * 96)
    with (tmp_path / "uneven.csv").open("w", newline="") as file:
        divided = [[*row, "test" if n % 5 == 0 else "train"] for n, row in enumerate(rows)]
        csv.writer(file).writerows([[*head, "split"], *divided])
    return review_spec.with_(data=str(tmp_path / "uneven.csv"), max_steps=3)


def test_a_run_says_so_and_groups_where_it_is_asked_to(uneven: Spec, tmp_path: Path) -> None:
    said: dict[bool, list[str]] = {True: [], False: []}
    runs = {
        group: inlay.tune(
            uneven.with_(group_by_length=group), tmp_path / "runs", progress=False, say=said[group].append
        )
        for group in said
    }
    assert all(any("the longest training text has" in line for line in lines) for lines in said.values())
    assert runs[True].id != runs[False].id
    assert runs[True].history() != runs[False].history(), "another order trains otherwise"
    assert "group_by_length" in runs[True].spec.to_json()


def test_where_there_is_no_length_to_group_by(image_model: Path, photos: Path, tmp_path: Path) -> None:
    images = Spec(model=str(image_model), data=str(photos), method="linear-probe", group_by_length=True, max_steps=1)
    with pytest.raises(InlayError, match="these are images"):
        inlay.tune(images, tmp_path / "runs", progress=False)
    with pytest.raises(InlayError, match="a run of one task"):
        Spec(model="m", method="multi-lora", tasks=("rte", "sst2"), group_by_length=True)
