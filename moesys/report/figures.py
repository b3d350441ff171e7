"""Charts of a report as plotly figures: plain dictionaries, ready for JSON. N logged steps."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesys.report.curves import smooth, smoothing_window, thin
from moesys.report.facts import evaluations, xz_bits_per_byte
from moesys.report.metrics import Floats
from moesys.report.runs import Run
from moesys.report.words import words

RUN_COLOURS = (
    "#1b6ca8", "#d1495b", "#2e8b57", "#8a4fa3", "#d9822b",
    "#1a9aa8", "#7a5c3e", "#cf5fa5", "#5c6770", "#8f9a2f",
)  # fmt: skip
EVAL_COLOUR = "#d1495b"
GREY = "#6b7280"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
FEW_STEPS = 40

Trace = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart of the page with the sentence that explains it."""

    key: str
    """Unique on the page."""
    title: str
    meaning: str
    """"" where the heading above several charts explains them."""
    figure: dict[str, Any] | None
    """{"data", "layout"} for plotly, or None if `remark` says all there is."""
    remark: str = ""


def run_colour(index: int) -> str:
    """Colour of the run at this place on the command line; colours repeat after ten."""
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def rounded(values: NDArray[Any]) -> list[Any]:
    """Nested lists for JSON: five significant figures, None for NaN and infinities."""
    if values.ndim > 1:
        return [rounded(row) for row in values]
    if np.issubdtype(values.dtype, np.integer):
        return list(map(int, values))
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]


def plain(text: str) -> str:
    """Text that plotly, which reads some HTML tags, shows as it is."""
    return html.escape(text, quote=False)


def layout(*, y: dict[str, Any], legend: bool, height: int = 300) -> dict[str, Any]:
    """The look that all charts share; `y` adds to the vertical axis, its "title" a text."""
    axis: dict[str, Any] = {
        "gridcolor": "#e8eaed", "zeroline": False, "linecolor": "#9aa1a9", "showline": True,
        "ticks": "outside", "tickcolor": "#9aa1a9", "ticklen": 4,
        "title": {"standoff": 10, "font": {"size": 12.5}},
    }  # fmt: skip
    named = {"title": axis["title"] | {"text": y["title"]}} if "title" in y else {}
    return {
        "height": height,
        # the right margin holds the buttons, so that they never lie over the legend or the curve
        "margin": {"l": 58, "r": 36, "t": 34 if legend else 12, "b": 44},
        "font": {"family": FONT, "size": 12.5, "color": "#24292f"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "#ffffff",
        "hovermode": "x unified",
        "hoverlabel": {"namelength": -1, "bgcolor": "rgba(255,255,255,0.94)"},
        "showlegend": legend,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.01, "yanchor": "bottom"},
        "modebar": {"orientation": "v", "bgcolor": "rgba(0,0,0,0)", "color": "#9aa1a9", "activecolor": GREY},
        "xaxis": axis | {"title": axis["title"] | {"text": "step", "standoff": 6}},
        "yaxis": axis
        | {"automargin": "left"}
        | {key: value for key, value in y.items() if key != "title"}
        | named,
    }


def line(
    x: NDArray[Any], y: NDArray[Any], *, name: str, colour: str, run: int, style: dict[str, Any] | None = None
) -> Trace:
    """A curve; `meta` is the run's index, by which the page shows and hides runs."""
    few = int(np.isfinite(y).sum()) <= FEW_STEPS
    return {
        "type": "scatter",
        "x": rounded(x),
        "y": rounded(y),
        "name": plain(name),
        "meta": run,
        "mode": "lines+markers" if few else "lines",
        "line": {"color": colour, "width": 1.8, "simplify": False},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": "%{y:.4~g}",
        **(style or {}),
    }


def curve_charts(runs: Sequence[Run], limit: int) -> dict[str, list[Chart]]:
    """Charts of everything but the experts, by section; at most `limit` points a curve."""
    auxiliary = dict.fromkeys(name for run in runs for name in run.metrics.auxiliary)
    sections = {
        "Loss and bits per byte": [_loss(runs, limit), _bits_per_byte(runs, limit)],
        "Optimisation": [
            _curve(runs, "lr", limit, smoother=None, y={"rangemode": "tozero", "exponentformat": "power"}),
            _gradient_norm(runs, limit),
        ],
        "Auxiliary losses": [_curve(runs, name, limit) for name in auxiliary],
        "Speed and memory": [
            _curve(runs, "tokens_per_second", limit, y={"rangemode": "tozero", "tickformat": "~s"}),
            _memory(runs, limit),
        ],
    }
    drawn = {title: [chart for chart in charts if chart is not None] for title, charts in sections.items()}
    return {title: charts for title, charts in drawn.items() if charts}


Smoother = Callable[[Floats, int], Floats]


def _smooth_logarithm(values: Floats, window: int) -> Floats:
    """Geometric moving mean: on a logarithmic axis one spike does not lift all its neighbours."""
    return np.exp(smooth(np.log(values), window))


def _traces(
    run: Run, index: int, name: str, limit: int, *, smoother: Smoother | None, alone: bool
) -> list[Trace]:
    """Raw curve, pale, under its smoothed curve; or the raw curve by itself."""
    values, steps = run.metrics.column(name), run.metrics.steps
    if not np.nan_to_num(values).any():  # such as the load-balance loss of a dense model beside an MoE model
        return []
    kept = thin(values, limit)
    colour = run_colour(index)
    label = "each step" if alone else run.name
    window = smoothing_window(len(steps))
    if smoother is None or window == 1:
        return [line(steps[kept], values[kept], name=label, colour=colour, run=index)]
    pale: dict[str, Any] = {"opacity": 0.4, "line": {"color": colour, "width": 1, "simplify": False}}
    if not alone:
        pale["hoverinfo"] = "skip"  # one value a run in the hover box, the smoothed one
        pale["hovertemplate"] = None
    mean = smoother(values, window)
    label = f"mean of {window} steps" if alone else run.name
    return [
        line(steps[kept], values[kept], name="each step", colour=colour, run=index, style=pale),
        line(steps[kept], mean[kept], name=label, colour=colour, run=index),
    ]


def _curve(
    runs: Sequence[Run],
    name: str,
    limit: int,
    *,
    smoother: Smoother | None = smooth,
    y: dict[str, Any] | None = None,
) -> Chart | None:
    """One quantity of all runs; None if no run has it, or it is 0 throughout."""
    alone = len(runs) == 1
    traces = [
        trace
        for index, run in enumerate(runs)
        for trace in _traces(run, index, name, limit, smoother=smoother, alone=alone)
    ]
    return _chart(runs, name, traces, y or {}, legend=alone and len(traces) > 1)


def _chart(
    runs: Sequence[Run], name: str, traces: list[Trace], y: dict[str, Any], *, legend: bool
) -> Chart | None:
    if not traces:
        return None
    if len(runs) > 1:  # the page's own key names the runs
        for trace in traces:
            trace["showlegend"] = trace["meta"] < 0
    text = words(name)
    look = layout(y=y, legend=legend)
    look["xaxis"] |= step_axis(runs)
    figure = {"data": traces, "layout": look}
    return Chart(key=name.replace("_", "-"), title=text.title, meaning=text.meaning, figure=figure)


def step_axis(runs: Sequence[Run]) -> dict[str, Any]:
    """Range of the step axis, the same in every chart of these runs, with a little room; whole ticks."""
    first = min(int(run.metrics.steps[0]) for run in runs)
    last = max(int(run.metrics.steps[-1]) for run in runs)
    room = max(0.02 * (last - first), 0.5)
    return {"range": [first - room, last + room]} | ({"dtick": 1} if last - first < 8 else {})


def _evaluations(run: Run, index: int, name: str, limit: int, *, alone: bool) -> list[Trace]:
    """Held-out points, joined by a thin line."""
    steps, values = evaluations(run, name)
    if not len(steps):
        return []
    kept = thin(values, limit)
    colour = EVAL_COLOUR if alone else run_colour(index)
    style = {
        "mode": "lines+markers",
        "line": {"color": colour, "width": 1.2, "dash": "solid" if alone else "dot"},
        "marker": {"color": "#ffffff", "size": 7, "line": {"color": colour, "width": 2}},
    }
    label = "held-out" if alone else f"{run.name}, held-out"
    return [line(steps[kept], values[kept], name=label, colour=colour, run=index, style=style)]


def _loss(runs: Sequence[Run], limit: int) -> Chart | None:
    alone = len(runs) == 1
    traces = []
    for index, run in enumerate(runs):
        name = "ce_loss" if run.metrics.has("ce_loss") else "loss"
        traces += _traces(run, index, name, limit, smoother=smooth, alone=alone)
        traces += _evaluations(run, index, "eval_loss", limit, alone=alone)
    return _chart(runs, "ce_loss", traces, {"title": "nats per token"}, legend=alone)


def _bits_per_byte(runs: Sequence[Run], limit: int) -> Chart | None:
    alone = len(runs) == 1
    traces = []
    for index, run in enumerate(runs):
        traces += _evaluations(run, index, "eval_bits_per_byte", limit, alone=alone)
    if not traces:
        return None
    yardsticks = {xz_bits_per_byte(run) for run in runs}
    levels = [
        _level(value, runs, f"xz -9: {value:.3f}") for value in sorted(filter(math.isfinite, yardsticks))
    ]
    return _chart(
        runs, "eval_bits_per_byte", traces + levels, {"title": "bits per byte"}, legend=alone or bool(levels)
    )


def _level(value: float, runs: Sequence[Run], name: str) -> Trace:
    """A dashed grey line at one height, which belongs to no run."""
    style = {"mode": "lines", "line": {"color": GREY, "width": 1.4, "dash": "dash"}}
    x = np.array(step_axis(runs)["range"])
    return line(x, np.array([value, value]), name=name, colour=GREY, run=-1, style=style)


def _gradient_norm(runs: Sequence[Run], limit: int) -> Chart | None:
    """On a logarithmic axis, unless a norm is 0; with the height at which it is clipped."""
    columns = [column[np.isfinite(column)] for column in (run.metrics.column("grad_norm") for run in runs)]
    known = np.concatenate(columns)
    logarithmic = len(known) > 0 and known.min() > 0
    smoother = _smooth_logarithm if logarithmic else smooth
    chart = _curve(runs, "grad_norm", limit, smoother=smoother)
    if chart is None or chart.figure is None:
        return None
    look = chart.figure["layout"]
    if logarithmic:
        look["yaxis"] |= {"type": "log", **_log_ticks(float(known.min()), float(known.max()))}
    clips = {run.setting("optimizer.clip") for run in runs}
    for clip in sorted(clip for clip in clips if isinstance(clip, int | float) and clip > 0):
        if clip <= known.max():  # a line far above the curve would only flatten it
            chart.figure["data"].append(_level(clip, runs, f"clipped to {clip:g}"))
            look |= {"showlegend": True, "margin": {**look["margin"], "t": 34}}
    return chart


def _log_ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks at 1, 2 and 5 times the powers of ten from low to high; at the powers alone over a wide range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    leading = (1, 2, 5) if len(powers) <= 4 else (1,)
    values = [float(f"{digit}e{power}") for power in powers for digit in leading]
    return {"tickvals": values, "ticktext": [f"{value:g}" for value in values]}


def _memory(runs: Sequence[Run], limit: int) -> Chart | None:
    """Peak memory in GiB."""
    y = {"rangemode": "tozero", "title": "GiB"}
    chart = _curve(runs, "peak_memory_bytes", limit, smoother=None, y=y)
    if chart is None or chart.figure is None:
        return None
    for trace in chart.figure["data"]:
        trace["y"] = [None if value is None else round(value / 2**30, 4) for value in trace["y"]]
    return chart
