"""Whether the rows of a batch have the mask and the places that InfoPrompt reads: looked at, or left to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.errors import InlayError
from inlay.methods.infoprompt.pieces import Site


def reads_masks(site: Site) -> bool:
    """Whether a state is read at the mask."""
    return "mask" in (site.state, site.phi) and site.config.mask_token_id is not None


def waits(device: torch.device) -> bool:
    """Whether to look at what a tensor holds makes the host wait for its device."""
    return device.type != "cpu"


def _wrong(site: Site, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Which rows (B) have a wrong number of places for prompts, and which have no mask where a state is read there."""
    wanted = site.config.num_prompt_tokens if site.config.placeholders else 0
    places = (ids < 0).sum(1) != wanted
    if not reads_masks(site):
        return places, None
    return places, (ids != site.config.mask_token_id).all(1)


def check(site: Site, ids: Tensor) -> None:
    """Refuse rows that lack a mask or a place, and those with too many places."""
    places, masks = (None if found is None else found.nonzero() for found in _wrong(site, ids))
    assert places is not None
    if len(places):
        row, placed = int(places[0]), site.config.placeholders
        hint = "encode texts with inlay.tasks.prompts.encode" if placed else "or set placeholders=True"
        raise InlayError(
            f"Row {row} of the batch has {int((ids[row] < 0).sum())} places for prompts (negative ids) and should have "
            f"{site.config.num_prompt_tokens if placed else 0}: {hint}."
        )
    if masks is not None and len(masks):
        raise InlayError(
            f"Row {int(masks[0])} of the batch has no mask token ({site.config.mask_token_id}), and Z is read there. "
            "Put {mask} into the template, or read another state: mean, first or last."
        )


def assert_right(site: Site, ids: Tensor) -> None:
    """The same without waiting: the device ends what it does, with this message, when it comes to a wrong row."""
    places, masks = _wrong(site, ids)
    right = ~(places if masks is None else places | masks).any()
    wanted = site.config.num_prompt_tokens if site.config.placeholders else 0
    needed = "" if masks is None else f" and the mask token {site.config.mask_token_id}"
    torch._assert_async(right, f"InfoPrompt: every row needs {wanted} places for prompts (negative ids){needed}")
