"""What a person sees while a run goes on: one live line in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

QUIET_SECONDS = 20.0
"""Where there is no terminal, seconds between lines."""


class TrainingProgress:
    """Live progress of a run on stderr; `note` prints lines that stay."""

    def __init__(self, step: int, steps: int) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._steps = steps
        self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("train", total=steps, completed=step, figures="")

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, row: dict[str, Any]) -> None:
        """Show a metrics row."""
        figures = (
            f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  grad {row['grad_norm']:.2f}  "
            f"{row['tokens_per_second']:,.0f} tok/s"
        )
        self._bar.update(self._task, completed=row["step"], figures=figures)
        due = time.monotonic() - self._last_line > QUIET_SECONDS or row["step"] == self._steps
        if not self.console.is_terminal and due:
            self._last_line = time.monotonic()
            self.note(f"step {row['step']}/{self._steps}  {figures}")

    def note(self, text: str) -> None:
        """Print a line above the live one."""
        self.console.print(text, markup=False)
