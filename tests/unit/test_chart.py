"""Pictures as SVG: where points lie, what is written, what cannot be drawn."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from echo2.chart import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Line, Panel, svg, ticks

NAMESPACE = "{http://www.w3.org/2000/svg}"


def a_panel(*lines: Line, **changes: object) -> Panel:
    values: dict[str, object] = {"title": "a < b & c", "x_label": "S", "y_label": "$"}
    return Panel(lines=lines, **{**values, **changes})  # type: ignore[arg-type]


def drawn(*panels: Panel) -> ElementTree.Element:
    return ElementTree.fromstring(svg(panels))


def points_of(tree: ElementTree.Element, tag: str = "polyline") -> list[list[tuple[float, float]]]:
    found = []
    for each in tree.iter(f"{NAMESPACE}{tag}"):
        pairs = (pair.split(",") for pair in each.attrib["points"].split())
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


def test_the_first_point_is_at_the_left_and_a_higher_value_is_drawn_higher() -> None:
    line = Line(name="cost", points=[(0, 10.0), (2, 30.0), (4, 20.0)])
    ((first, second, third),) = points_of(drawn(a_panel(line)))
    assert first[0] == LEFT
    assert third[0] == WIDTH - RIGHT
    assert second[0] == pytest.approx((first[0] + third[0]) / 2)
    assert pytest.approx(second[1]) == TOP  # the highest tick is 30
    assert second[1] < third[1] < first[1] < HEIGHT


def test_titles_names_and_marks_are_written_and_escaped() -> None:
    tree = drawn(
        a_panel(
            Line(name="S = 3, κ = 2", points=[(1, 1.0), (9, 2.0)]),
            marks=[(3, "taken"), (20, "off")],
        )
    )
    told = [each.text for each in tree.iter(f"{NAMESPACE}text")]
    assert {"a < b & c", "S", "$", "S = 3, κ = 2", "taken"} <= set(told)
    assert "off" not in told  # outside the axis


def test_a_band_goes_around_its_line() -> None:
    line = Line(name="x", points=[(0, 2.0), (1, 3.0)], low=[1.0, 2.5], high=[4.0, 5.0])
    tree = drawn(a_panel(line))
    ((left_top, right_top, right_low, left_low),) = points_of(tree, "polygon")
    ((left, right),) = points_of(tree)
    assert left_top[1] < left[1] < left_low[1]
    assert right_top[1] < right[1] < right_low[1]


def test_panels_stand_side_by_side() -> None:
    one = a_panel(Line(name="x", points=[(0, 1.0)]))
    tree = drawn(one, one)
    assert int(tree.attrib["width"]) == 2 * WIDTH
    assert len(points_of(tree)) == 2


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 100.0, [0, 20, 40, 60, 80, 100]), (1437.0, 1437.0, None), (0.0, 0.0, None)],
)
def test_ticks_are_round_and_hold_the_values(
    low: float, high: float, expected: list[float] | None
) -> None:
    found = ticks(low, high)
    assert found[0] <= low <= high <= found[-1]
    assert found[0] < found[-1]
    if expected is not None:
        assert found == pytest.approx(expected)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="no points"):
        Line(name="x", points=[])
    with pytest.raises(ValueError, match="not finite"):
        Line(name="x", points=[(0, float("inf"))])
    with pytest.raises(ValueError, match="no lines"):
        a_panel()
    with pytest.raises(ValueError, match="at least one panel"):
        svg([])
