"""The plots in docs are those of the results they name."""

import re
from itertools import pairwise

import pytest

from benchmarks.bar_charts import Panel, bar_chart
from benchmarks.curves import CurvePanel, curve_chart
from benchmarks.plots import PLOTS, plots
from benchmarks.scheduler_plots import log_lines


def test_the_plots_are_up_to_date():
    drawn = plots()
    assert sorted(drawn) == sorted(path.name for path in PLOTS.glob("*.svg"))
    for name, svg in drawn.items():
        assert (PLOTS / name).read_text() == svg, f"run python -m benchmarks.plots: {name} is of other results"


def test_bar_height_is_proportional_to_value():
    svg = bar_chart("t", "n", [Panel("x", "y", {"ours": {"a": 1.0, "b": 2.0}})])
    _page, _legend, one, two = (float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)', svg))
    assert two == pytest.approx(2 * one, rel=1e-3)


def test_labels_of_many_groups_do_not_overlap():
    groups = [f"256×{512 + place}" for place in range(20)]
    svg = bar_chart("t", "n", [Panel("x", "y", {"ours": dict.fromkeys(groups, 1.0)})])
    drawn = re.findall(r'<text x="([\d.]+)" y="[\d.]+" font-size="([\d.]+)" text-anchor="middle">(256×\d+)</text>', svg)
    assert [group for _x, _size, group in drawn] == groups
    edges = [(float(x), 0.65 * float(size) * len(group) / 2) for x, size, group in drawn]
    assert all(x + half < y - other for (x, half), (y, other) in pairwise(edges))


def test_line_heights_are_logarithmic():
    svg = log_lines("t", "n", {"panel": {"ours": [(1.0, 10.0), (2.0, 100.0), (3.0, 1000.0)]}})
    (points,) = re.findall(r'points="([^"]+)"', svg)
    xs, ys = zip(*(map(float, point.split(",")) for point in points.split()))
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], rel=1e-2) and ys[0] > ys[1]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], rel=1e-2)


def test_curve_shows_mean_and_range_of_runs():
    svg = curve_chart("t", "n", "step", [CurvePanel("y", {"ours": [[0.0, 1.0], [0.0, 3.0]], "none": [[0.0, 0.0]]})])
    ends = [points.split()[-1] for points in re.findall(r'<polyline points="([^"]+)"', svg)]
    (mean, floor) = (float(end.split(",")[1]) for end in ends)
    low, high = re.findall(r'<polygon points="([^"]+)"', svg)[0].split()[1:3]
    least, most = (float(point.split(",")[1]) for point in (low, high))
    assert floor - least == pytest.approx(least - mean, rel=1e-2) == pytest.approx(mean - most, rel=1e-2)
