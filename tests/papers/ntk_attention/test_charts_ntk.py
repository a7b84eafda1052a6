"""Figure 3: what is drawn is what was measured."""

from __future__ import annotations

from inlay.papers.ntk_attention.charts.cost import cost


def test_every_length_has_a_line_of_each_kind_and_linear_growth_beside_them() -> None:
    rows = [
        {"L": length, "m": 2**power, "exact_ms": 1e-3 * length * (length + 2**power), "ntk_ms": 1e-3 * length**2}
        for length in (32, 64)
        for power in (16, 0, 8)
    ]
    (axes,) = cost(rows).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    drawn = {str(line.get_label()): line.get_xydata() for line in axes.get_lines()}
    assert len(drawn) == 5
    for length in (32, 64):
        exact, ours = drawn[f"exact prefix, L = {length}"], drawn[f"NTK-Attention, L = {length}"]
        assert exact[:, 0].tolist() == ours[:, 0].tolist() == [1, 256, 65536]
        assert exact[:, 1].tolist() == sorted(row["exact_ms"] for row in rows if row["L"] == length)
        assert len(set(ours[:, 1])) == 1
    (m, more), (time, longer) = drawn["linear in m"].T
    assert longer / time == more / m
