"""The plots in docs are those of the results they name."""

import re

import pytest

from benchmarks.plots import PLOTS, bars, plots


def test_the_plots_are_up_to_date():
    drawn = plots()
    assert sorted(drawn) == sorted(path.name for path in PLOTS.glob("*.svg"))
    for name, svg in drawn.items():
        assert (PLOTS / name).read_text() == svg, f"run python -m benchmarks.plots: {name} is of other results"


def test_a_bar_is_as_high_as_its_value():
    svg = bars("t", "n", {"ours": {"a": 1.0, "b": 2.0}})
    _page, _legend, one, two = (float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)', svg))
    assert two == pytest.approx(2 * one, rel=1e-3)
