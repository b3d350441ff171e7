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
        self._due = time.monotonic()
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
            f"loss {_number(row['loss'], '.4f')}  lr {row['lr']:.2e}  grad {_number(row['grad_norm'], '.2f')}  "
            f"{row['tokens_per_second']:,.0f} tok/s"
        )
        self._bar.update(self._task, completed=row["step"], figures=figures)
        due = time.monotonic() > self._due and not self.console.is_terminal
        if due or row["step"] == self._steps:
            self._due = time.monotonic() + QUIET_SECONDS
            self.note(f"step {row['step']}/{self._steps}  {figures}")
        if "eval_loss" in row:
            self.note(
                f"step {row['step']}: held-out loss {_number(row['eval_loss'], '.4f')}, "
                f"{_number(row['eval_bits_per_byte'], '.4f')} bits per byte (on {row['eval_tokens']:,} tokens)"
            )

    def evaluating(self, done: int, total: int) -> None:
        """Show how far an evaluation is, in tokens."""
        self._bar.update(self._task, figures=f"evaluating: {done:,} of {total:,} tokens")

    def note(self, text: str) -> None:
        """Print a line above the live one."""
        self.console.print(text, markup=False)


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
