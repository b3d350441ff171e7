"""A whole run: folder, data, loop, evaluation, checkpoints, and an end that loses nothing."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from moesys.checkpoint import Checkpointer, list_checkpoints, load_newest
from moesys.config import RunConfig
from moesys.configuration import load_saved
from moesys.data import Batch, Data, Tokenizer, TrainingStream, open_data
from moesys.models.count import count_parameters
from moesys.training.diagnose import locate_nonfinite
from moesys.training.evaluate import Evaluation, evaluate
from moesys.training.folder import create_run_folder, lock, write_whole
from moesys.training.metrics import MetricsFile, peak_memory_bytes
from moesys.training.progress import TrainingProgress
from moesys.training.recorders import Recorders
from moesys.training.trainer import StepResult, Trainer


class DivergedError(ValueError):
    """The loss or the gradient was not finite for too many steps in a row."""


def train(config: RunConfig) -> Path:
    """Train from the start; returns the run folder."""
    device = pick_device(config)
    data = open_data(
        config.data,
        vocab_size=config.model.vocab_size,
        sequence_length=config.training.sequence_length,
        seed=config.training.seed,
    )
    folder, config = create_run_folder(config)
    data.tokenizer.save(folder / "tokenizer.json")
    Run(folder, config, data, device).go()
    return folder


def resume(folder: Path, overrides: list[str]) -> Path:
    """Go on from the newest whole checkpoint of a run, with command-line overrides on top of its configuration."""
    config = load_saved(folder, overrides, check_machine=True)
    device = pick_device(config)
    data = open_data(
        config.data,
        vocab_size=config.model.vocab_size,
        sequence_length=config.training.sequence_length,
        seed=config.training.seed,
        tokenizer=Tokenizer.load(folder / "tokenizer.json"),
    )
    run = Run(folder, config, data, device)
    run.restore()
    run.go()
    return folder


def pick_device(config: RunConfig) -> torch.device:
    """The device of the run; also sets the number of CPU threads."""
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    name = config.training.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def micro_batches(stream: TrainingStream, config: RunConfig, step: int, device: torch.device) -> list[Batch]:
    """The global batch of the optimiser step after finished step `step`, as micro-batches on the device."""
    size, micro = config.training.batch_size, config.training.micro_batch_size
    batch = stream.batch(step * size, size)
    return [batch.rows(start, start + micro).to(device) for start in range(0, size, micro)]


class Run:
    """The state of one run in this process."""

    def __init__(self, folder: Path, config: RunConfig, data: Data, device: torch.device) -> None:
        self.folder, self.config, self.data, self.device = folder, config, data, device
        self._lock = lock(folder)
        self.trainer = Trainer(config, device)
        self.tokens = 0
        self.seconds = 0.0
        self.bad_steps = 0
        self.saved_step = -1
        self.stop_signal: int | None = None

    def restore(self) -> None:
        """Fill model and optimiser from the newest whole checkpoint; start over when none was ever written."""
        checkpoints = self.folder / "checkpoints"
        if not checkpoints.is_dir() or not list_checkpoints(checkpoints):
            print(f"{self.folder} has no checkpoint yet: starting from step 0")
            return
        path, state, skipped = load_newest(checkpoints, self.trainer.tensors())
        for message in skipped:
            print(message)
        self.trainer.loaded(state["step"])
        self.saved_step = self.trainer.step
        self.tokens, self.seconds, self.bad_steps = state["tokens"], state["seconds"], state["bad_steps"]
        print(f"resuming from {path}")

    def go(self) -> None:
        """Train to the last step, evaluate, and say what to do next."""
        config, steps = self.config, self.config.training.steps
        self._introduce()
        with ExitStack() as stack:
            metrics = MetricsFile(self.folder / "metrics.jsonl", keep_steps=self.trainer.step)
            stack.callback(metrics.close)
            recorders = Recorders(config, self.folder, self.trainer.step + 1)
            stack.callback(recorders.close)
            saver = Checkpointer(
                self.folder / "checkpoints",
                keep=config.checkpoint.keep,
                asynchronous=config.checkpoint.asynchronous,
            )
            stack.callback(saver.close)
            stack.enter_context(self._signals())
            progress = stack.enter_context(TrainingProgress(self.trainer.step, steps))
            self._started = time.monotonic() - self.seconds
            while self.trainer.step < steps and self.stop_signal is None:
                row = self._one_step(progress)
                metrics.write(row)
                recorders.write(row)
                progress.update(row)
                interval = config.checkpoint.interval
                if interval and self.trainer.step % interval == 0 and self.trainer.step < steps:
                    self._save(saver)
            if self.trainer.step != self.saved_step:
                self._save(saver)
            saver.wait()
            final = None if self.stop_signal is not None else self._evaluate(progress, None)
        if final is None:
            assert self.stop_signal is not None
            print(
                f"stopped by {signal.Signals(self.stop_signal).name} after step {self.trainer.step}; everything is "
                f"saved. Go on with:\n  moesys train --resume {self.folder}"
            )
        else:
            self._conclude(final)

    def _one_step(self, progress: TrainingProgress) -> dict[str, Any]:
        begin = time.monotonic()
        batches = micro_batches(self.data.train, self.config, self.trainer.step, self.device)
        result = self.trainer.train_step(batches)
        self.tokens += result.tokens
        if result.skipped:
            self._skipped(batches, progress)
        else:
            self.bad_steps = 0
        row = self._row(result, time.monotonic() - begin)
        training = self.config.training
        step = self.trainer.step
        if training.eval_interval and step % training.eval_interval == 0 and step < training.steps:
            found = self._evaluate(progress, training.eval_tokens)
            row |= _evaluation_row(found)
            progress.note(
                f"step {step}: held-out loss {found.loss:.4f}, {found.bits_per_byte:.4f} bits per byte "
                f"(on {found.tokens:,} tokens)"
            )
        return row

    def _row(self, result: StepResult, seconds: float) -> dict[str, Any]:
        row: dict[str, Any] = {
            "step": self.trainer.step,
            "tokens": self.tokens,
            "loss": result.loss,
            "ce_loss": result.ce_loss,
            "load_balance_loss": result.load_balance_loss,
            "z_loss": result.z_loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens_per_second": result.tokens / seconds,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "experts": result.counts.figures(),
        }
        if self.config.model.mtp_depth:
            row["mtp_loss"] = result.mtp_loss
        return row

    def _skipped(self, batches: list[Batch], progress: TrainingProgress) -> None:
        self.bad_steps += 1
        where = locate_nonfinite(self.trainer, batches)
        progress.note(f"step {self.trainer.step}: not finite in {where}; the update was skipped")
        if self.bad_steps >= self.config.training.nan_patience:
            saved = list_checkpoints(self.folder / "checkpoints")
            good = f"the last good checkpoint is {saved[0]}" if saved else "no checkpoint was written before"
            raise DivergedError(
                f"step {self.trainer.step}: loss or gradient not finite for {self.bad_steps} steps in a row, first "
                f"seen now in {where}; {good}. A lower --optimizer.lr, a longer --optimizer.warmup-share or "
                "--training.precision float32 usually helps"
            )

    def _evaluate(self, progress: TrainingProgress, max_tokens: int | None) -> Evaluation:
        training = self.config.training
        if max_tokens is None:
            progress.note("evaluating on all held-out text ...")
        return evaluate(
            self.trainer.model,
            self.data.validation,
            sequence_length=training.sequence_length,
            batch_size=training.micro_batch_size,
            max_tokens=max_tokens,
            cross_document_attention=self.config.data.cross_document_attention,
            chunk=training.loss_chunk,
        )

    def _save(self, saver: Checkpointer) -> None:
        state = {
            "step": self.trainer.step,
            "tokens": self.tokens,
            "seconds": time.monotonic() - self._started,
            "bad_steps": self.bad_steps,
        }
        saver.save(self.trainer.step, self.trainer.tensors(), state)
        self.saved_step = self.trainer.step

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn the first SIGTERM or Ctrl-C into an orderly end after the current step; a second one ends at once."""

        def note(number: int, frame: FrameType | None) -> None:
            if self.stop_signal is not None:
                raise KeyboardInterrupt
            self.stop_signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _introduce(self) -> None:
        config, model = self.config, self.config.model
        count = count_parameters(model)
        layers = model.moe_layer_indices
        print(f"run      {self.folder}")
        print(
            f"model    {config.preset}: {count.total / 1e6:.1f} M parameters, {count.active / 1e6:.1f} M active"
        )
        if layers:
            print(
                f"experts  {model.num_experts} routed (top-{model.top_k}, {model.router}) and "
                f"{model.num_shared_experts} shared in {len(layers)} of {model.num_layers} layers"
            )
        print(f"losses   {', '.join(_active_losses(config))}")
        print(f"data     {self.data.description}")
        print(
            f"device   {self.device}, {config.training.precision}, {torch.get_num_threads()} threads",
            flush=True,
        )

    def _conclude(self, final: Evaluation) -> None:
        yardstick = self.data.xz_bits_per_byte()
        count = count_parameters(self.config.model)
        seconds = time.monotonic() - self._started
        summary = {
            "steps": self.trainer.step,
            "tokens": self.tokens,
            "seconds": seconds,
            "eval_loss": final.loss,
            "eval_bits_per_byte": final.bits_per_byte,
            "eval_tokens": final.tokens,
            "eval_bytes": final.num_bytes,
            "xz_bits_per_byte": yardstick,
            "parameters": count.total,
            "active_parameters": count.active,
        }
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        about = "" if final.exact_bytes else " (bytes estimated by document)"
        print(
            f"\nheld-out {final.bits_per_byte:.4f} bits per byte{about}, loss {final.loss:.4f} per token "
            f"on {final.tokens:,} tokens; xz -9 needs {yardstick:.4f} bits per byte for the same text\n"
            f"trained  {self.tokens:,} tokens in {seconds:,.0f} s\n\nnext:\n"
            f'  moesys generate {self.folder} --prompt "def " --max-new-tokens 200 --temperature 0.8\n'
            f"  moesys report {self.folder}\n"
            f"  moesys train --resume {self.folder} --training.steps {2 * self.trainer.step}"
        )


def _evaluation_row(found: Evaluation) -> dict[str, Any]:
    values = asdict(found)
    return {
        "eval_loss": values["loss"],
        "eval_bits_per_byte": values["bits_per_byte"],
        "eval_tokens": values["tokens"],
    }


def _active_losses(config: RunConfig) -> Iterator[str]:
    balance = config.balance
    yield "cross-entropy"
    if config.model.mtp_depth:
        yield f"multi-token prediction x {config.training.mtp_weight:g}"
    if config.model.moe_layer_indices:
        if balance.loss_coef:
            yield f"load balance ({balance.loss_scope}) x {balance.loss_coef:g}"
        if balance.z_loss_coef:
            yield f"router z x {balance.z_loss_coef:g}"
        if balance.bias_rate:
            yield f"bias balancing at rate {balance.bias_rate:g}"
