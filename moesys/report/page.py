"""The report as one HTML page that needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from plotly.offline import get_plotlyjs

from moesys.report.assets import CSS, SCRIPT
from moesys.report.curves import smoothing_window, tail_length
from moesys.report.expert_figures import (
    LOAD_COLOURS,
    LOAD_TOP,
    MOST_CURVES,
    PER_LAYER,
    layer_charts,
    load_maps,
)
from moesys.report.facts import UNKNOWN, Fact, best_runs, figures, setup, status, verdict, warnings
from moesys.report.figures import Chart, curve_charts, run_colour
from moesys.report.runs import Run, differing_settings, flatten
from moesys.report.words import words

MOST_POINTS = 2000
"""Points of one curve."""
ALL_POINTS = 100_000
"""Points of all curves of a page, about 1.5 MB."""
MOST_BINS = 300
"""Columns of one heat map."""
ALL_CELLS = 250_000
"""Cells of all heat maps of a page, about 1.5 MB."""

# Nothing may be fetched, whatever a library or a run's name tries; images of charts need data: and blob:.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def render(runs: Sequence[Run]) -> str:
    """The page for one run, or for several side by side."""
    names = ", ".join(run.name for run in runs)
    points, bins = _limits(runs)
    body = [
        _head_of_one(runs[0]) if len(runs) == 1 else _head_of_several(runs),
        *_curve_sections(runs, points),
        *(_expert_section(run, index, points, bins, len(runs) == 1) for index, run in enumerate(runs)),
        _footer(runs, points, bins),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(names)} – moesys report</title>\n<style>{CSS}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + f"\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _limits(runs: Sequence[Run]) -> tuple[int, int]:
    """Points a curve and columns a heat map that keep the page small, however many runs and experts."""
    curves, rows = 0, 0
    for run in runs:
        layers = run.metrics.layers
        curves += 10 + 2 * len(run.metrics.auxiliary)
        rows += sum(layer.num_experts for layer in layers.values())
        if len(layers) <= MOST_CURVES:
            curves += len(layers) * len(PER_LAYER)
        else:
            rows += len(layers) * len(PER_LAYER)
    points = max(20, min(MOST_POINTS, ALL_POINTS // curves))
    return points, max(1, min(MOST_BINS, ALL_CELLS // max(rows, 1)))


def _head_of_one(run: Run) -> str:
    tiles = [
        f"<div{' class=first' * (place == 0)}><dt>{escape(fact.label)}</dt><dd>{escape(fact.text)}</dd></div>"
        for place, fact in enumerate(figures(run))
        if fact.text != UNKNOWN
    ]
    return "\n".join(
        [
            f"<header><h1>{escape(run.name)}</h1>",
            f'<p class="status">{escape(status(run).capitalize())}.</p>',
            f"<p>{escape(verdict(run))}</p>",
            _warnings(run),
            f'<dl class="tiles">{"".join(tiles)}</dl>',
            _setup(run),
            "</header>",
        ]
    )


def _warnings(run: Run, name: str = "") -> str:
    """What a reader should know before trusting the charts, after the run's name if it is not alone."""
    before = f"<strong>{escape(name)}</strong>: " if name else ""
    return "".join(f'<p class="warn">{before}{escape(text)}</p>' for text in warnings(run))


def _definitions(facts: Iterable[Fact]) -> str:
    rows = "".join(f"<dt>{escape(fact.label)}</dt><dd>{escape(fact.text)}</dd>" for fact in facts)
    return f'<dl class="setup">{rows}</dl>'


def _setup(run: Run) -> str:
    whole = "\n".join(
        f"{key} = {json.dumps(value, ensure_ascii=False, default=str)}"
        for key, value in flatten(run.config).items()
    )
    return (
        f"{_definitions(setup(run))}\n<details><summary>Whole configuration</summary>"
        f"<pre>{escape(whole)}</pre></details>"
    )


def _head_of_several(runs: Sequence[Run]) -> str:
    lines = [
        f"<header><h1>{len(runs)} runs side by side</h1>",
        '<p class="status">The best of a row is bold where the figures differ and one side is better.</p>',
        _table(runs, _figure_rows(runs)),
        "".join(_warnings(run, run.name) for run in runs),
        "<h2>Settings that differ</h2>",
    ]
    differing = differing_settings(runs)
    if differing:
        rows: list[Row] = [
            (
                key,
                [
                    UNKNOWN if value is None else json.dumps(value, ensure_ascii=False, default=str)
                    for value in row
                ],
                set(),
            )
            for key, row in differing.items()
        ]
        lines.append(_table(runs, rows))
    else:
        lines.append("<p>None: the configurations are the same.</p>")
    for run in runs:
        lines.append(f"<details><summary>{escape(run.name)}: setup</summary>{_setup(run)}</details>")
    return "\n".join([*lines, "</header>", _key(runs)])


Row = tuple[str, list[str], set[int]]


def _figure_rows(runs: Sequence[Run]) -> list[Row]:
    """Label, one text a run, and which of them are best; runs without a figure show a dash."""
    by_run = [{fact.label: fact for fact in figures(run)} for run in runs]
    labels = dict.fromkeys(label for facts in by_run for label in facts)
    rows: list[Row] = [("State", [status(run) for run in runs], set())]
    for label in labels:
        row = [facts.get(label, Fact(label=label, text=UNKNOWN)) for facts in by_run]
        if any(fact.text != UNKNOWN for fact in row):
            rows.append((label, [fact.text for fact in row], best_runs(row)))
    return rows


def _table(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    """A row a figure, a column a run."""
    head = "".join(
        f'<th scope="col">{_swatch(index)} {escape(run.name)}</th>' for index, run in enumerate(runs)
    )
    lines = []
    for label, texts, best in rows:
        cells = "".join(
            f"<td{' class=best' if index in best else ''}>{escape(text)}</td>"
            for index, text in enumerate(texts)
        )
        lines.append(f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>')
    return (
        f'<div class="table"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _swatch(index: int) -> str:
    return f'<span class="swatch" style="background:{run_colour(index)}"></span>'


def _key(runs: Sequence[Run]) -> str:
    """Colours of the runs, which stay in view and show or hide a run in every shared chart."""
    labels = "".join(
        f'<label><input type="checkbox" value="{index}" checked>{_swatch(index)} {escape(run.name)}</label>'
        for index, run in enumerate(runs)
    )
    lines = "Pale: each step. Full colour: smoothed. Rings: held-out text."
    return f'<div class="key">{labels}<span class="soft">{lines}</span></div>'


def _curve_sections(runs: Sequence[Run], points: int) -> list[str]:
    return [
        f'<section class="shared"><h2>{title}</h2>{_charts(charts)}</section>'
        for title, charts in curve_charts(runs, points).items()
    ]


def _charts(charts: Sequence[Chart], kind: str = "charts") -> str:
    return f'<div class="{kind}">{"".join(map(_figure, charts))}</div>'


def _figure(chart: Chart) -> str:
    caption = f"<figcaption>{escape(chart.meaning)}</figcaption>" if chart.meaning else ""
    head = f"<figure><h3>{escape(chart.title)}</h3>{caption}"
    if chart.figure is None:
        return f'{head}<p class="remark">{escape(chart.remark)}</p></figure>'
    # "<" never stands in the JSON, so no text in it can close the script element.
    data = json.dumps(chart.figure, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    key, height = escape(chart.key), chart.figure["layout"]["height"]
    return (
        f'{head}<div class="plot" data-figure="{key}" style="height:{height}px"></div>'
        f'<script type="application/json" id="{key}">{data}</script></figure>\n'
    )


def _expert_section(run: Run, index: int, points: int, bins: int, alone: bool) -> str:
    """Maps and curves of the experts; nothing for a dense model."""
    if not run.metrics.layers:
        return ""
    before, after = ("", "") if alone else (f"{_swatch(index)} ", f": {escape(run.name)}")
    return (
        f"<section><h2>{before}{words('share').title}{after}</h2><p>{escape(words('share').meaning)}</p>{_scale()}"
        f"{_charts(load_maps(run, index, bins), 'charts maps')}</section>\n"
        f"<section><h2>{before}Balance by layer{after}</h2>"
        f"{_charts(layer_charts(run, index, points, bins))}</section>"
    )


def _scale() -> str:
    """The colours of the load maps, drawn once for all of them."""
    stops = ", ".join(f"{colour} {value / LOAD_TOP:.2%}" for value, colour in LOAD_COLOURS)
    ticks = ((0.0, "0"), (0.5, "½"), (1.0, "1 = even"), (2.0, "2"), (3.0, "3"), (LOAD_TOP, "4 or more"))
    marks = "".join(f'<span style="left:{value / LOAD_TOP:.2%}">{text}</span>' for value, text in ticks)
    return (
        f'<div class="scale">share of tokens × number of experts; grey: no value'
        f'<div class="bar" style="background:linear-gradient(to right, {stops})"></div>'
        f'<div class="ticks">{marks}</div></div>'
    )


def _footer(runs: Sequence[Run], points: int, bins: int) -> str:
    """How what is drawn comes from what was logged."""
    windows = sorted({smoothing_window(len(run.metrics.steps)) for run in runs})
    tails = sorted({tail_length(len(run.metrics.steps)) for run in runs})
    lines = [
        f"Curves of more than {points:,} points are thinned to at most that many: of each piece of the curve "
        "its smallest and largest value stay, so spikes remain visible.",
        f"Smoothed curves are centred moving means over {_or(windows)} steps (2% of the run), taken before "
        "thinning; geometric means for the gradient norm where its axis is logarithmic.",
        f"Figures “at the end” and of the worst layer are means over the last {_or(tails)} step(s).",
        f"Heat maps have at most {bins:,} columns; each is the mean of the steps it covers.",
        "The last held-out value of an ended run is its final evaluation, on all held-out text; those before it "
        "may be on a part.",
        "This page holds all its data and its drawing library, and fetches nothing.",
    ]
    if not any(run.metrics.layers for run in runs):
        lines[2:4] = [f"The training loss at the end is the mean over the last {_or(tails)} step(s)."]
    return f"<footer>{''.join(f'<p>{line}</p>' for line in lines)}</footer>"


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(f"{number:,}" for number in numbers)
