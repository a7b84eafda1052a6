"""Templates: fields, two segments, the mask, and what is refused."""

from __future__ import annotations

import pytest

from inlay.errors import InlayError
from inlay.tasks import templates

ROW = {"a": "first {sep} text", "b": "second"}


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{a}", ("first {sep} text", None)),
        ("{a}{sep}{b}", ("first {sep} text", "second")),
        ("{b} It was {mask}.", ("second It was [M].", None)),
        ("{{{b}}}", ("{second}", None)),
        (templates.default(["a", "b"]), ("first {sep} text", "second")),
        (templates.default(["b"]), ("second", None)),
    ],
)
def test_rendering(template: str, rendered: tuple[str, str | None]) -> None:
    assert templates.render(template, ROW, "[M]") == rendered


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{c}", r"Unknown placeholder .* 'c'"),
        ("nothing", "uses none of the fields a, b"),
        ("{a}{sep}{b}{sep}{a}", r"more than one \{sep\}"),
        ("{a", "cannot be read"),
        ("{}", "cannot be read"),
        ("{a:>10}", "cannot be read"),
    ],
)
def test_what_is_refused(template: str, message: str) -> None:
    with pytest.raises(InlayError, match=message):
        templates.check(template, ["a", "b"])


def test_a_mask_needs_a_model_that_has_one() -> None:
    with pytest.raises(InlayError, match="no mask token"):
        templates.render("{a} {mask}", ROW, None)
