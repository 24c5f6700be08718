"""The plots in docs are those of the results they name."""

import re

import pytest

from benchmarks.plots import PLOTS, bars, plots
from benchmarks.scheduler_plots import log_lines


def test_the_plots_are_up_to_date():
    drawn = plots()
    assert sorted(drawn) == sorted(path.name for path in PLOTS.glob("*.svg"))
    for name, svg in drawn.items():
        assert (PLOTS / name).read_text() == svg, f"run python -m benchmarks.plots: {name} is of other results"


def test_a_bar_is_as_high_as_its_value():
    svg = bars("t", "n", {"ours": {"a": 1.0, "b": 2.0}})
    _page, _legend, one, two = (float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)', svg))
    assert two == pytest.approx(2 * one, rel=1e-3)


def test_a_line_climbs_by_the_logarithm_of_its_values():
    svg = log_lines("t", "n", {"panel": {"ours": [(1.0, 10.0), (2.0, 100.0), (3.0, 1000.0)]}})
    (points,) = re.findall(r'points="([^"]+)"', svg)
    xs, ys = zip(*(map(float, point.split(",")) for point in points.split()))
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], rel=1e-2) and ys[0] > ys[1]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], rel=1e-2)
