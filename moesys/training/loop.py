"""The steps of a run from where it stands to its end, and everything that they write."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moesys.checkpoint import Checkpointer
from moesys.config import RunConfig
from moesys.data import Batch, Data, TrainingStream
from moesys.training.diagnose import diverged, locate_nonfinite
from moesys.training.evaluate import Evaluation, evaluate
from moesys.training.metrics import MetricsFile, peak_memory_bytes, strict
from moesys.training.progress import TrainingProgress
from moesys.training.recorders import Recorders
from moesys.training.signals import StopSignals
from moesys.training.trainer import StepResult, Trainer


class StoppedError(Exception):
    """A signal came in the middle of an evaluation."""


@dataclass(kw_only=True)
class RunState:
    """What a run carries from step to step beside weights and moments: the state.json of its checkpoints."""

    step: int = 0
    """Finished optimiser steps."""
    samples: int = 0
    """Samples trained on; the next batch starts there."""
    tokens: int = 0
    """Real tokens in these."""
    seconds: float = 0.0
    """Wall time spent on the run."""
    bad_steps: int = 0
    """Steps in a row, up to this one, that were not finite."""
    pending: dict[str, Any] | None = None
    """Metrics of this step, not written yet since a signal came in the middle of its evaluation."""
    data: str = ""
    """Which text, and how much of it."""


@dataclass(kw_only=True)
class Loop:
    """One session of a run."""

    folder: Path
    config: RunConfig
    data: Data
    trainer: Trainer
    state: RunState
    saved_step: int
    """Step of the newest checkpoint; -1 where there is none."""
    metrics: MetricsFile
    recorders: Recorders
    saver: Checkpointer
    stop: StopSignals
    progress: TrainingProgress

    def run(self) -> Evaluation | None:
        """Train to the last step, save, and evaluate on all held-out text; None if a signal came before the end.

        Raises DivergedError, and OSError when metrics or a checkpoint cannot be written.
        """
        self._started = time.monotonic() - self.state.seconds
        if self.state.pending is not None:
            self._end_step(self.state.pending)
        while self.state.step < self.config.training.steps and self.stop.received is None:
            self._step()
            self.saver.check()
        if self.state.step != self.saved_step:
            self._save()
        self.saver.wait()
        final = self._evaluate(None)
        self.state.seconds = time.monotonic() - self._started
        return final

    def _step(self) -> None:
        state, begin = self.state, time.monotonic()
        batches = micro_batches(self.data.train, self.config, state.samples, self.trainer.device)
        result = self.trainer.train_step(batches)
        state.step += 1
        state.samples += self.config.training.batch_size
        state.tokens += result.tokens
        state.bad_steps = state.bad_steps + 1 if result.skipped else 0
        self._end_step(self._row(result, time.monotonic() - begin))
        interval = self.config.checkpoint.interval
        if result.skipped:
            self._skipped(batches)
        elif interval and state.step % interval == 0 and state.step < self.config.training.steps:
            self._save()

    def _end_step(self, row: dict[str, Any]) -> None:
        """Evaluate if it is time, and write the row; a signal in between leaves it pending."""
        training, step = self.config.training, row["step"]
        if training.eval_interval and step % training.eval_interval == 0 and step < training.steps:
            found = self._evaluate(training.eval_tokens)
            if found is None:
                self.state.pending = strict(row)
                return
            row = row | {
                "eval_loss": found.loss,
                "eval_bits_per_byte": found.bits_per_byte,
                "eval_tokens": found.tokens,
            }
        self.state.pending = None
        self.metrics.write(row)
        problem = self.recorders.write(row)
        self.progress.update(row)
        if problem is not None:
            self.progress.note(problem)

    def _row(self, result: StepResult, seconds: float) -> dict[str, Any]:
        row: dict[str, Any] = {
            "step": self.state.step,
            "tokens": self.state.tokens,
            "loss": result.loss,
            "ce_loss": result.ce_loss,
            "load_balance_loss": result.load_balance_loss,
            "z_loss": result.z_loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens_per_second": result.tokens / seconds,
            "peak_memory_bytes": peak_memory_bytes(self.trainer.device),
            "experts": result.counts.figures(),
        }
        if self.config.model.mtp_depth:
            row["mtp_loss"] = result.mtp_loss
        return row

    def _skipped(self, batches: list[Batch]) -> None:
        where = locate_nonfinite(self.trainer, batches)
        self.progress.note(f"step {self.state.step}: not finite in {where}; the update was skipped")
        if self.state.bad_steps >= self.config.training.nan_patience:
            self.saver.wait()
            raise diverged(self.folder, self.state.step, self.state.bad_steps, where)

    def _evaluate(self, max_tokens: int | None) -> Evaluation | None:
        training, done = self.config.training, 0
        total = self.data.validation.num_tokens - 1
        total = total if max_tokens is None else min(total, max_tokens)

        def watch(tokens: int) -> None:
            nonlocal done
            done += tokens
            self.progress.evaluating(done, total)
            if self.stop.received is not None:
                raise StoppedError

        try:
            watch(0)
            return evaluate(
                self.trainer.model,
                self.data.validation,
                sequence_length=training.sequence_length,
                batch_size=training.micro_batch_size,
                max_tokens=max_tokens,
                cross_document_attention=self.config.data.cross_document_attention,
                chunk=training.loss_chunk,
                on_batch=watch,
            )
        except StoppedError:
            return None

    def _save(self) -> None:
        self.state.seconds = time.monotonic() - self._started
        self.metrics.sync()  # no checkpoint may outlive the metrics of its steps
        self.saver.save(self.state.step, self.trainer.tensors(), asdict(self.state))
        self.saved_step = self.state.step


def micro_batches(
    stream: TrainingStream, config: RunConfig, first_sample: int, device: torch.device
) -> list[Batch]:
    """The global batch that starts at a sample, as micro-batches on the device."""
    size, micro = config.training.batch_size, config.training.micro_batch_size
    batch = stream.batch(first_sample, size)
    return [batch.rows(start, start + micro).to(device) for start in range(0, size, micro)]
