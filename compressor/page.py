"""Pages of figures, shared by all reports: one template written as HTML or Markdown, and plots as SVG inside the page.

A plot is made by a function that draws on the axes it is given, called through `svg`. Its colours are those of the
page, so that it follows a light or dark scheme and stays readable on paper.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from scipy.optimize import isotonic_regression

Form = Literal["html", "markdown"]
# Colours that matplotlib writes, and what the page puts in their place.
INK, STRONG, FAINT = "#010101", "#020202", "#030303"
PAGE_COLOURS = {INK: "currentColor", STRONG: "var(--strong)", FAINT: "var(--faint)"}
WIDTH, HEIGHT = 4.4, 2.4  # of a plot, inches
MARKERS = "osD^v<>ph*"
POINTS_PER_INCH = 72
LEADER = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 4}
LINE = 12.0  # height of a line of text, points


def render(
    template: str, *, form: Form, package: str = "compressor", plots: Mapping[str, str] | None = None, **values: Any
) -> str:
    """Fill in a template of `package` (its folder `templates`), which says once what both forms say.

    It sees `form`, `plots` (by name, made by `svg`) and `values`. It may extend "base.html", the frame and style of a
    page, and import the parts from "parts.html" with context; both come from here. Text is escaped for the form: in
    HTML all that is put in, in Markdown what goes through the parts.
    """
    jinja = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("compressor")]),
        autoescape=form == "html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"points": lambda share: f"{100 * share:.1f}"}
    jinja.filters |= {"plain": plain, "pretty": lambda value: json.dumps(value, indent=1, ensure_ascii=False)}
    text = jinja.get_template(template).render(form=form, plots=plots or {}, **values)
    return text if form == "html" else re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def plain(text: object) -> str:
    """`text` on one line, nothing in it read as Markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", " ".join(str(text).split()))


def svg(name: str, draw: Callable[[Axes], None], *, height: float = HEIGHT) -> str:
    """A plot as an SVG element for a page: no prolog or date, ids of its own, colours of the page; `height` in inches.

    `name` is unique on the page.
    """
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9, "text.color": INK}
    style |= {f"{part}.color": INK for part in ("xtick", "ytick")} | {"axes.labelcolor": INK, "axes.edgecolor": INK}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none", "ytick.major.size": 0}
    buffer = io.StringIO()
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        figure.patch.set_visible(False)
        draw(figure.subplots())
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = re.sub(r'(?s)^.*?(?=<svg)|<metadata>.*?</metadata>| xmlns(:\w+)?="[^"]*"|<!--.*?-->', "", buffer.getvalue())
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return re.sub("|".join(PAGE_COLOURS), lambda found: PAGE_COLOURS[found[0]], text)


def height_for(rows: int) -> float:
    """Inches that a plot needs for so many rows or labels."""
    return max(HEIGHT, (rows + 4) * 1.2 * LINE / POINTS_PER_INCH)


def bars(axes: Axes, values: Mapping[str, float], label: str, form: str, *, log: bool = False) -> None:
    """One value per row, written beside its mark: a bar from zero, or on a log scale, which has none, a dot.

    `form` formats a value, as in "{:.1f} MB".
    """
    lengths = list(values.values())
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlim(10 ** math.floor(math.log10(min(lengths))), 10 ** math.ceil(math.log10(2 * max(lengths))))
        axes.plot(lengths, range(len(values)), "o", color=STRONG)
    else:
        axes.barh(range(len(values)), lengths, height=0.5, color=STRONG)
        axes.margins(x=0.2)
    _name_rows(axes, list(values))
    axes.set_xlabel(label)
    for place, value in enumerate(lengths):
        axes.annotate(form.format(value), (value, place), xytext=(7, 0), textcoords="offset points", va="center")


def intervals(
    axes: Axes, names: Sequence[str], series: Mapping[str, Sequence[tuple[float, float, float]]], label: str
) -> None:
    """Values with their intervals: a row for each of `names`, in it a mark for each series.

    A series gives (value, low end, high end) for each name. The last of the series is the one that matters.
    """
    for number, (name, found) in enumerate(series.items()):
        last = number == len(series) - 1
        middle = np.array([value for value, _, _ in found])
        ends = np.array([(low, high) for _, low, high in found]).T
        places = np.arange(len(names)) + 0.24 * (number - (len(series) - 1) / 2)
        colour = STRONG if last else FAINT
        axes.errorbar(
            middle, places, xerr=abs(ends - middle), label=name, color=colour, fmt="o", capsize=3, markersize=5
        )
    _name_rows(axes, names)
    axes.set_xlabel(label)
    if len(series) > 1:
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(series), borderpad=0)


def scatter(
    axes: Axes,
    points: Mapping[str, tuple[float, float]],
    labels: tuple[str, str],
    *,
    log_x: bool = False,
    strong: Collection[str] = (),
    spans: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """One named point (x, y) for each system; names stand at the right, each with a line to its point.

    `labels` are those of the axes, `spans` the ends of the intervals of y. The points named in `strong` stand out; none
    named, all do.
    """
    if log_x:
        _log_scale(axes, "x", [x for x, _ in points.values()])
    for name, (x, y) in points.items():
        low, high = spans[name] if spans else (y, y)
        colour = STRONG if name in strong or not strong else FAINT
        axes.errorbar(x, y, yerr=[[y - low], [high - y]], fmt="o", color=colour, linewidth=1)
    axes.margins(0.1)
    _finish(axes, labels, points)


def lines(
    axes: Axes,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    labels: tuple[str, str],
    *,
    log_x: bool = False,
    log_y: bool = False,
    strong: Collection[str] = (),
) -> None:
    """One named curve (xs, ys) for each system; names stand at the right, each with a line to the curve's last point.

    `labels` are those of the axes. The curves named in `strong` stand out; none named, the last does. Every curve
    has marks of its own shape, so that none is told by its colour alone.
    """
    chosen = strong or list(series)[-1:]
    if log_x:
        _log_scale(axes, "x", [x for xs, _ in series.values() for x in xs])
    if log_y:
        _log_scale(axes, "y", [y for _, ys in series.values() for y in ys])
    for number, (name, (xs, ys)) in enumerate(series.items()):
        colour, marker = (STRONG if name in chosen else FAINT), MARKERS[number % len(MARKERS)]
        axes.plot(xs, ys, color=colour, marker=marker, markersize=4, linewidth=1.2)
    _finish(axes, labels, {name: (xs[-1], ys[-1]) for name, (xs, ys) in series.items()})


def reliability(
    axes: Axes, systems: Mapping[str, Sequence[Mapping[str, Any]]], *, strong: Collection[str] = ()
) -> None:
    """Share of right answers by confidence, with 95 % intervals; on the dotted line the two are the same.

    `systems` have the bins that `statistics.calibration` gives. Those named in `strong` stand out; none named, the last
    does.
    """
    chosen = strong or list(systems)[-1:]
    least = min(row["confidence"] for rows in systems.values() for row in rows)
    axes.plot([100 * least, 100], [100 * least, 100], linestyle=":", color=INK, linewidth=0.8)
    ends = {}
    for number, (name, rows) in enumerate(systems.items()):
        xs, ys = [100 * row["confidence"] for row in rows], [100 * row["accuracy"] for row in rows]
        spans = np.array([row["interval_95"] for row in rows]).T
        colour, marker = (STRONG if name in chosen else FAINT), MARKERS[number % len(MARKERS)]
        axes.errorbar(xs, ys, yerr=abs(100 * spans - ys), color=colour, marker=marker, markersize=4, linewidth=1)
        ends[name] = (xs[-1], ys[-1])
    _finish(axes, ("mean confidence of texts alike in it x 100", "right answers x 100"), ends)


def _finish(axes: Axes, labels: tuple[str, str], ends: Mapping[str, tuple[float, float]]) -> None:
    """Label the axes, and write each name at the right of the plot, level with its point where there is room."""
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.autoscale_view()
    to_share = axes.transScale + axes.transLimits
    wanted = {name: float(to_share.transform(end)[1]) for name, end in ends.items()}
    order = sorted(wanted, key=lambda name: wanted[name])
    figure = axes.get_figure(root=True)
    assert figure is not None
    gap = LINE / (0.75 * figure.get_figheight() * POINTS_PER_INCH)  # the axes have about 3/4 of the height
    for name, place in zip(order, spread([wanted[name] for name in order], gap), strict=True):
        axes.annotate(
            name,
            ends[name],
            xytext=(1.04, place),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops=LEADER,
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places in rising order, moved as little as needed to be `gap` apart; neighbours in a heap keep its middle."""
    steps = gap * np.arange(len(places))
    # Places are `gap` apart where what is left without the steps does not fall.
    spaced: list[float] = (isotonic_regression(np.asarray(places) - steps).x + steps).tolist()
    return spaced


def _log_scale(axes: Axes, axis: Literal["x", "y"], values: Iterable[float]) -> None:
    """A log scale a little wider than the values, with plain numbers."""
    known = list(values)
    low, high = min(known) / 1.5, max(known) * 1.5
    axes.set(**{f"{axis}scale": "log", f"{axis}lim": (low, high)})
    shown = axes.xaxis if axis == "x" else axes.yaxis
    shown.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    shown.set_major_formatter("{x:g}")
    shown.set_minor_formatter("")


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names at the left of the rows, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
