"""A batch in parts of about the same length: which rows go together, and what each part looks like."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from inlay.training.mixed_batches import ALONG, divide_rows, split_batch

CPU = torch.device("cpu")


def padded(lengths: list[int], rows: list[int]) -> int:
    return len(rows) * max(lengths[row] for row in rows)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40), cost=st.integers(0, 2000))
def test_every_row_is_in_one_group_and_no_group_is_worth_cutting(lengths: list[int], cost: int) -> None:
    groups = divide_rows(lengths, cost)
    assert sorted(row for rows in groups for row in rows) == list(range(len(lengths)))
    for rows in groups:
        by_length = sorted(rows, key=lambda row: -lengths[row])
        cuts = [(by_length[:i], by_length[i:]) for i in range(1, len(rows))]
        saved = [padded(lengths, rows) - padded(lengths, a) - padded(lengths, b) for a, b in cuts]
        assert max(saved, default=0) <= cost
    # Each group that was cut off was worth it.
    assert padded(lengths, list(range(len(lengths)))) >= sum(padded(lengths, g) for g in groups) + cost * (
        len(groups) - 1
    )


def test_a_part_is_padded_as_if_by_itself() -> None:
    lengths = [3, 200, 4, 190, 3]
    ids = torch.arange(5 * 200).view(5, 200)
    mask = (torch.arange(200) < torch.tensor(lengths).unsqueeze(1)).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(5)}
    found = {tuple(rows): part for rows, part in split_batch(batch, CPU)}
    assert set(found) == {(1, 3), (0, 2, 4)}
    short = found[0, 2, 4]
    assert short["input_ids"].equal(ids[[0, 2, 4], :4])
    assert short["attention_mask"].equal(mask[[0, 2, 4], :4])
    assert short["labels"].tolist() == [0, 2, 4]
    assert found[1, 3]["input_ids"].equal(ids[[1, 3]])


def test_padding_on_the_left_and_labels_of_tokens_are_cut_too() -> None:
    mask = (torch.arange(200) >= torch.tensor([190, 0, 196]).unsqueeze(1)).long()
    batch = {"input_ids": mask * 7, "attention_mask": mask, "labels": mask * 5}
    found = {tuple(rows): part for rows, part in split_batch(batch, CPU, (*ALONG, "labels"))}
    assert found[0, 2]["labels"].equal(batch["labels"][[0, 2], 190:])
    assert found[0, 2]["input_ids"].equal(batch["input_ids"][[0, 2], 190:])


def test_what_has_no_lengths_is_one_part() -> None:
    batch = {"pixel_values": torch.zeros(3, 1, 2, 2), "labels": torch.arange(3)}
    ((rows, part),) = split_batch(batch, CPU)
    assert rows == [0, 1, 2]
    assert part == batch
