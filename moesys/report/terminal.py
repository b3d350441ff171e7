"""`moesys inspect`: training runs in the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moesys.report import Folders
from moesys.report.blocks import area, load_bar, stretch
from moesys.report.curves import tail_length, tail_mean
from moesys.report.facts import (
    UNKNOWN,
    Fact,
    best_runs,
    decimals,
    evaluations,
    figures,
    setup,
    status,
    verdict,
    warnings,
)
from moesys.report.metrics import Floats
from moesys.report.runs import Run, differing_settings, read_runs

RUN_WIDTH = 18
"""Columns of the terminal that a run needs in a table."""
LABEL_WIDTH = 9
BARS_A_LINE = 32
BARS = (
    "Bars: share of the tokens times the number of experts; ▄ is an even share, █ twice that or more, "
    "· nothing. Violation: busiest expert's load over the mean, minus 1. Entropy: 1 is even."
)


@dataclass(frozen=True, kw_only=True)
class InspectArguments:
    """Show a run, or several side by side, in the terminal: figures, curves and the load of the experts."""

    runs: Folders = ()
    """Run folders, as `moesys train` writes them."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A quantity drawn in the terminal."""

    name: str
    title: str
    logarithmic: bool = False
    from_zero: bool = False


CURVES = (
    Curve(name="ce_loss", title="Training loss (nats per token)"),
    Curve(name="eval_bits_per_byte", title="Held-out bits per byte"),
    Curve(name="grad_norm", title="Gradient norm (logarithmic)", logarithmic=True),
    Curve(name="tokens_per_second", title="Tokens per second", from_zero=True),
)


def main(arguments: Sequence[str]) -> int:
    """Print the runs and return 0. Raises ValueError or OSError as `read_runs` does."""
    parsed = tyro.cli(InspectArguments, args=arguments, prog="moesys inspect")
    show(read_runs(parsed.runs), Console(highlight=False))
    return 0


def show(runs: Sequence[Run], console: Console) -> None:
    """Print the runs, at the width of the console and without colour where it has none."""
    if len(runs) == 1:
        _show_head(runs[0], console)
    else:
        _show_figures(runs, console)
        _show_settings(runs, console)
    for curve in CURVES:
        _show_curve(curve, runs, console)
    for run in runs:
        _show_experts(run, console, alone=len(runs) == 1)
    if any(run.metrics.layers for run in runs):
        console.print(Text(BARS, style="dim"))


def _show_head(run: Run, console: Console) -> None:
    console.print(Text.assemble((run.name, "bold"), f": {status(run)}"))
    console.print(Text(verdict(run)))
    for text in warnings(run):
        console.print(Text(text, style="yellow"))
    console.print()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for fact in [*figures(run), *setup(run)]:
        if fact.text != UNKNOWN:
            grid.add_row(Text(fact.label), Text(fact.text))
    console.print(grid)


def _groups(runs: Sequence[Run], console: Console) -> list[range]:
    """The runs, as many at a time as fit side by side."""
    size = max(1, (console.width - 2 * RUN_WIDTH) // RUN_WIDTH + 1)
    return [range(start, min(start + size, len(runs))) for start in range(0, len(runs), size)]


def _show_figures(runs: Sequence[Run], console: Console) -> None:
    by_run = [{fact.label: fact for fact in figures(run)} for run in runs]
    labels = dict.fromkeys(label for facts in by_run for label in facts)
    for group in _groups(runs, console):
        table = _table(runs, group)
        table.add_row(Text("State"), *(Text(status(runs[index])) for index in group))
        for label in labels:
            row = [facts.get(label, Fact(label=label, text=UNKNOWN)) for facts in by_run]
            best = best_runs(row)
            cells = [Text(row[index].text, style="bold green" if index in best else "") for index in group]
            table.add_row(Text(label), *cells)
        console.print(table)
    for run in runs:
        for text in warnings(run):
            console.print(Text(f"{run.name}: {text}", style="yellow"))


def _show_settings(runs: Sequence[Run], console: Console) -> None:
    differing = differing_settings(runs)
    if not differing:
        console.print("The configurations are the same.")
        return
    console.print(Text("Settings that differ", style="bold"))
    for group in _groups(runs, console):
        table = _table(runs, group)
        for key, row in differing.items():
            values = [
                UNKNOWN if row[index] is None else json.dumps(row[index], default=str) for index in group
            ]
            table.add_row(Text(key), *map(Text, values))
        console.print(table)


def _table(runs: Sequence[Run], group: range) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", style="dim", overflow="fold")
    for index in group:
        table.add_column(Text(runs[index].name), overflow="fold")
    return table


def _known(curve: Curve, run: Run) -> tuple[NDArray[np.int64], Floats]:
    """Steps and values to draw: all steps for what every step has, only the evaluations for what they give."""
    if curve.name.startswith("eval_"):
        return evaluations(run, curve.name)
    values = run.metrics.column(curve.name)
    known = np.isfinite(values) & ((values > 0) | (not curve.logarithmic))
    return run.metrics.steps, np.where(known, values, np.nan)


def _show_curve(curve: Curve, runs: Sequence[Run], console: Console) -> None:
    """One quantity: a tall chart of a single run, a line a run on one scale for several."""
    known = [(run, *_known(curve, run)) for run in runs]
    drawn = [(run, steps, values) for run, steps, values in known if np.isfinite(values).any()]
    if not drawn:
        return
    console.print()
    if len(runs) == 1:
        _show_tall(curve, *drawn[0][1:], console)
    else:
        console.print(Text(curve.title, style="bold"))
        _show_lines(curve, [(run, values) for run, _, values in drawn], console)


def _scaled(curve: Curve, values: Floats) -> Floats:
    return np.log10(values) if curve.logarithmic else values


def _bounds(curve: Curve, columns: Sequence[Floats]) -> tuple[float, float]:
    """Lower and upper end of the scale over what is drawn."""
    known = np.concatenate([column[np.isfinite(column)] for column in columns])
    return (0.0 if curve.from_zero else float(known.min())), float(known.max())


def _show_tall(curve: Curve, steps: NDArray[np.int64], values: Floats, console: Console) -> None:
    known = np.isfinite(values)
    ends = f"{_short(values[known][0])} → {_short(values[known][-1])}"
    console.print(Text.assemble((curve.title, "bold"), f"  {ends}"))
    width = max(console.width - LABEL_WIDTH - 2, 8)
    column = stretch(_scaled(curve, values), width)
    low, high = _bounds(curve, [column])
    lines = area(column, 4, low, high)
    top, bottom = (10**end if curve.logarithmic else end for end in (high, low))
    labels = [_short(top), "", "", _short(bottom)]
    for label, text in zip(labels, lines, strict=True):
        console.print(Text(f"{label:>{LABEL_WIDTH}} "), Text(text, style="blue"), sep="")
    first, last = f"step {steps[0]:,}", f"{steps[-1]:,}"
    if len(steps) == 1:
        first, last = "", first
    console.print(Text(" " * (LABEL_WIDTH + 1) + first + f"{last:>{width - len(first)}}", style="dim"))


def _show_lines(curve: Curve, drawn: Sequence[tuple[Run, Floats]], console: Console) -> None:
    """As long as the run has steps, so that equal steps stand under each other."""
    names = min(max(len(run.name) for run, _ in drawn), console.width // 3)
    room = max(console.width - names - 22, 8)
    longest = max(int(run.metrics.steps[-1]) for run, _ in drawn)
    widths = [max(1, round(room * int(run.metrics.steps[-1]) / longest)) for run, _ in drawn]
    columns = [
        stretch(_scaled(curve, values), width) for (_, values), width in zip(drawn, widths, strict=True)
    ]
    low, high = _bounds(curve, columns)
    for (run, values), column in zip(drawn, columns, strict=True):
        known = values[np.isfinite(values)]
        name = run.name if len(run.name) <= names else "…" + run.name[1 - names :]
        ends = f"{_short(known[0]):>9} → {_short(known[-1])}"
        console.print(
            Text(f"{name:<{names}} "),
            Text(f"{area(column, 1, low, high)[0]:<{room}}", "blue"),
            Text(ends),
            sep="",
        )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _show_experts(run: Run, console: Console, *, alone: bool) -> None:
    """Load of every expert at the end of the run, a row a layer; nothing for a dense model."""
    if not run.metrics.layers:
        return
    tail = tail_length(len(run.metrics.steps))
    when = "at the last step" if tail == 1 else f"mean of the last {tail} steps"
    console.print()
    of = "" if alone else f" of {run.name}"
    console.print(Text(f"Expert load{of}, {when}", style="bold"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("Layer", "Violation", "Entropy", "Dead", "Dropped"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("Load of each expert")
    for number, layer in run.metrics.layers.items():
        dropped = float(tail_mean(layer.dropped_share, tail))
        dead = float(tail_mean(layer.dead, tail))
        table.add_row(
            str(number),
            decimals(float(tail_mean(layer.max_violation, tail)), 2),
            decimals(float(tail_mean(layer.relative_entropy, tail))),
            f"{dead:.3g}" if math.isfinite(dead) else UNKNOWN,
            f"{dropped:.2%}" if math.isfinite(dropped) else UNKNOWN,
            _bars(tail_mean(layer.relative_load, tail)),
        )
    console.print(table)


def _bars(load: Floats) -> Text:
    text = Text()
    for expert, value in enumerate(load.tolist()):
        if expert and expert % BARS_A_LINE == 0:
            text.append("\n")
        text.append(load_bar(value), style=_load_style(value))
    return text


def _load_style(load: float) -> str:
    """Blue under half an even share, red from twice of it, yellow on the way there."""
    if load < 0.5:
        return "blue"
    return "red" if load >= 2 else "yellow" if load >= 1.5 else ""
