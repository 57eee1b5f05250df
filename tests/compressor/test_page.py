"""Pages of figures: what both forms escape, and plots whose labels can be read."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor import page
from compressor.page import bars, height_for, intervals, lines, plain, render, scatter, spread, svg

TEMPLATE = """{% extends "base.html" %}
{% from "parts.html" import title, say, head, row, end, plot with context %}
{% set heading = name %}
{% block body %}
{{ title("Figures of " ~ name) }}
{{ say(name ~ " took 3 % of the time") }}
{{ head(["system", "ms"], right=2) }}
{{ row([name, 1.5]) }}
{{ end() }}
{{ plot("speed", "Plot: speed") }}
{% endblock %}
"""
HOSTILE = "<b>a|b</b>"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a template of its own."""
    (tmp_path / "other_reports" / "templates").mkdir(parents=True)
    (tmp_path / "other_reports" / "__init__.py").touch()
    (tmp_path / "other_reports" / "templates" / "other.html").write_text(TEMPLATE)
    monkeypatch.syspath_prepend(tmp_path)
    return "other_reports"


def test_another_package_brings_its_own_template(package: str) -> None:
    drawn = svg("speed", lambda axes: bars(axes, {"a": 1.0}, "ms", "{:.1f}"))
    text = render("other.html", form="html", package=package, plots={"speed": drawn}, name=HOSTILE)
    assert text.startswith("<!DOCTYPE html>")
    assert "<h1>&lt;b&gt;a|b&lt;/b&gt;</h1>" in text
    assert "<td>&lt;b&gt;a|b&lt;/b&gt;</td><td>1.5</td>" in text
    assert '<figure role="img" aria-label="Plot: speed"><svg' in text
    assert "<b>" not in text


def test_the_same_template_gives_markdown(package: str) -> None:
    text = render("other.html", form="markdown", package=package, name=HOSTILE)
    assert r"| \<b\>a\|b\</b\> | 1.5 |" in text
    assert "| system | ms |\n|---|---:|\n|" in text
    assert "figure" not in text
    assert "\n\n\n" not in text


def test_plain_text_stays_on_its_line() -> None:
    assert plain("a\n| *b*") == r"a \| \*b\*"


def test_two_plots_share_no_id() -> None:
    first, second = (svg(name, lambda axes: bars(axes, {"a": 1.0}, "ms", "{:.1f}")) for name in ("one", "two"))
    ids = [set(re.findall(r' id="([^"]+)"', text)) for text in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_plots_hold_the_colours_of_the_page_only() -> None:
    names = ["a", "b"]
    drawn = [
        svg("i", lambda axes: intervals(axes, names, {"x": [(1, 0, 2)] * 2, "y": [(1, 0, 2)] * 2}, "score")),
        svg("s", lambda axes: scatter(axes, {"a": (1, 2), "b": (10, 3)}, ("ms", "score"), log_x=True, strong=["b"])),
        svg("l", lambda axes: lines(axes, {"a": ([1, 2], [3, 4]), "b": ([1, 2], [5, 9])}, ("x", "y"), log_y=True)),
    ]
    for text in drawn:
        assert set(re.findall(r"#[0-9a-f]{6}\b", text)) <= {"#ffffff"}
        assert "var(--strong)" in text
        assert "var(--faint)" in text


@pytest.mark.parametrize("systems", [1, 3, 20])
def test_names_of_points_never_lie_on_each_other(systems: int) -> None:
    points = {f"system {number}": (1.0 + number, 90 + number % 2) for number in range(systems)}
    text = svg("s", lambda axes: scatter(axes, points, ("ms", "score"), log_x=True), height=height_for(systems))
    found = re.findall(r'y="(\S+)"[^>]*>system', text)
    places = sorted(float(place) for place in found)
    assert len(places) == systems
    assert np.all(np.diff(places) >= 9)  # the size of the letters
    assert min(places) >= 0
    assert max(places) <= 72 * height_for(systems)


def test_spread_moves_only_what_is_too_near() -> None:
    assert spread([0.1, 0.5, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.45, 0.55, 0.9])


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0.01, 0.2))
def test_spread_keeps_order_and_gap(places: list[float], gap: float) -> None:
    found = spread(sorted(places), gap)
    assert len(found) == len(places)
    assert all(after - before >= gap - 1e-9 for before, after in pairwise(found))


def test_a_log_scale_shows_plain_numbers() -> None:
    text = svg("b", lambda axes: page.bars(axes, {"a": 0.2, "b": 30.0}, "ms", "{:g}", log=True))
    assert all(f">{number}<" in text for number in ("0.1", "1", "10", "100"))
