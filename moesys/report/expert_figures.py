"""Charts of the experts' load of one run, layer by layer. L MoE layers, N logged steps, E experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moesys.report.curves import bin_means, thin
from moesys.report.figures import Chart, layout, line, rounded, step_axis
from moesys.report.metrics import Floats, LayerLoad
from moesys.report.runs import Run
from moesys.report.words import words

LOAD_TOP = 4.0
LOAD_COLOURS = (
    (0.0, "#0b2a5b"), (0.25, "#2a6db0"), (0.5, "#7fb2d8"), (0.8, "#dbe8f1"), (1.0, "#f7f6f3"),
    (1.25, "#fbe0cf"), (1.6, "#f2a37f"), (2.0, "#d6604d"), (3.0, "#a81c2f"), (LOAD_TOP, "#67001f"),
)  # fmt: skip
"""Load (share * E) and its colour: palest at 1, so that colour means uneven; equal steps up to ×2 and down
to ÷2 look alike."""
NO_VALUE = "#d5d8dc"
DEPTH_COLOURS = (
    "#e6a532", "#d9772f", "#c14e4a", "#9b3a6c", "#6f3a8c", "#46459c", "#25639c", "#12848c",
)  # fmt: skip
"""For layers as curves, from the first to the last."""
MOST_CURVES = len(DEPTH_COLOURS)
UNEVEN_COLOURS = ("#fbf8ef", "#f6d9a8", "#eda46a", "#d6604d", "#a81c2f", "#67001f")
"""For maps of one quantity a layer, from even to uneven."""

PER_LAYER: dict[str, tuple[Callable[[LayerLoad], Floats], dict[str, Any]]] = {
    "max_violation": (lambda layer: layer.max_violation, {"rangemode": "tozero"}),
    "entropy": (lambda layer: layer.relative_entropy, {}),
    "dead": (lambda layer: layer.dead, {"rangemode": "tozero"}),
    "dropped_share": (lambda layer: layer.dropped_share, {"rangemode": "tozero", "tickformat": ".2~%"}),
}


def load_maps(run: Run, index: int, bins: int) -> list[Chart]:
    """A heat map a layer: x step (means over at most `bins` pieces), y expert, colour share * E."""
    steps = np.round(bin_means(run.metrics.steps, bins)).astype(int)
    return [
        Chart(
            key=f"run-{index}-load-{number}",
            title=f"Layer {number}",
            meaning="",
            figure=_load_map(layer, steps, bins),
        )
        for number, layer in run.metrics.layers.items()
    ]


def _load_map(layer: LayerLoad, steps: np.ndarray, bins: int) -> dict[str, Any]:
    trace = {
        "type": "heatmap",
        "x": rounded(steps),
        "z": rounded(np.round(bin_means(layer.relative_load, bins), 3).T),
        "zmin": 0,
        "zmax": LOAD_TOP,
        "colorscale": [[value / LOAD_TOP, colour] for value, colour in LOAD_COLOURS],
        "showscale": False,
        "hoverongaps": False,
        "hovertemplate": "step %{x}<br>expert %{y}<br>share × E %{z:.2f}<extra></extra>",
    }
    height = int(np.clip(70 + 8 * layer.num_experts, 150, 420))
    figure = _map_figure(trace, "expert", height)
    if layer.num_experts <= 8:
        figure["layout"]["yaxis"]["dtick"] = 1
    return figure


def _map_figure(trace: dict[str, Any], rows: str, height: int) -> dict[str, Any]:
    """A heat map with row 0 at the top and grey where there is no value."""
    y = {"title": rows, "autorange": "reversed", "showgrid": False}
    look = layout(y=y, legend=False, height=height)
    look["xaxis"] |= {"showgrid": False} | ({"dtick": 1} if len(trace["x"]) < 8 else {})
    return {"data": [trace], "layout": look | {"hovermode": "closest", "plot_bgcolor": NO_VALUE}}


def layer_charts(run: Run, index: int, limit: int, bins: int) -> list[Chart]:
    """Maximal violation, relative entropy, dead experts and drops of every layer over time.

    Curves for up to eight layers, otherwise a map with a row a layer.
    """
    charts = []
    for name, (values_of, y) in PER_LAYER.items():
        rows = {number: values_of(layer) for number, layer in run.metrics.layers.items()}
        known = np.concatenate([row[np.isfinite(row)] for row in rows.values()])
        if not len(known):
            continue
        figure, remark = None, ""
        if name in ("dead", "dropped_share") and not known.any():
            remark = "0 at every step in every layer."
        elif len(rows) <= MOST_CURVES:
            whole = {"dtick": 1} if name == "dead" and known.max() <= 6 else {}
            figure = _layer_curves(run, index, rows, limit, y | whole)
        else:
            figure = _layer_map(run, rows, bins, name)
        text = words(name)
        key = f"run-{index}-{name.replace('_', '-')}"
        charts.append(Chart(key=key, title=text.title, meaning=text.meaning, figure=figure, remark=remark))
    return charts


def _layer_curves(
    run: Run, index: int, rows: dict[int, Floats], limit: int, y: dict[str, Any]
) -> dict[str, Any]:
    traces = []
    for place, (number, values) in enumerate(rows.items()):
        kept = thin(values, limit)
        colour = DEPTH_COLOURS[place * (MOST_CURVES - 1) // max(len(rows) - 1, 1)]
        style = {"line": {"color": colour, "width": 1.2, "simplify": False}}
        steps = run.metrics.steps[kept]
        traces.append(
            line(steps, values[kept], name=f"layer {number}", colour=colour, run=index, style=style)
        )
    look = layout(y=y, legend=True)
    look["xaxis"] |= step_axis([run])
    return {"data": traces, "layout": look}


def _layer_map(run: Run, rows: dict[int, Floats], bins: int, name: str) -> dict[str, Any]:
    """Rows are layers, colour the quantity, darker further from even."""
    steps = np.round(bin_means(run.metrics.steps, bins)).astype(int)
    # finer towards even, where a run spends most of its time
    scale = [
        ((place / (len(UNEVEN_COLOURS) - 1)) ** 2, colour) for place, colour in enumerate(UNEVEN_COLOURS)
    ]
    if name == "entropy":  # even at its upper end
        scale = [(1 - value, colour) for value, colour in reversed(scale)]
    trace = {
        "type": "heatmap",
        "x": rounded(steps),
        "y": [str(number) for number in rows],
        "z": [rounded(bin_means(values, bins)) for values in rows.values()],
        "colorscale": [list(stop) for stop in scale],
        "colorbar": {"thickness": 12, "outlinewidth": 0},
        "hoverongaps": False,
        "hovertemplate": "step %{x}<br>layer %{y}<br>%{z:.4~g}<extra></extra>",
    }
    figure = _map_figure(trace, "layer", int(np.clip(80 + 9 * len(rows), 220, 620)))
    figure["layout"]["yaxis"]["type"] = "category"
    return figure
