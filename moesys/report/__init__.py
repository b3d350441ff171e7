"""`moesys report`: training runs as one HTML page that opens offline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Write one HTML page with the charts of a run, or of several runs side by side. It opens offline."""

    runs: Folders = ()
    """Run folders, as `moesys train` writes them."""
    out: Path | None = None
    """The page to write; by default report.html in the run, or comparison.html in the first of several."""


def main(arguments: Sequence[str]) -> int:
    """Write the page, print its path, and return 0.

    Raises ValueError or OSError for folders that are no runs or cannot be read, or a page that cannot be
    written.
    """
    from moesys.report.page import render
    from moesys.report.runs import read_runs

    parsed = tyro.cli(ReportArguments, args=arguments, prog="moesys report")
    runs = read_runs(parsed.runs)
    default = parsed.runs[0] / ("report.html" if len(runs) == 1 else "comparison.html") if runs else None
    out = parsed.out or default
    assert out is not None
    _write(out, render(runs))
    print(out)
    return 0


def _write(path: Path, text: str) -> None:
    """Write beside the file and rename, so that a page being read is never half a page."""
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder; name the file to write, such as {path / 'report.html'}")
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            f"the report cannot be written to {path}: {error.strerror}; "
            "name another place with --out FILE.html"
        ) from None
