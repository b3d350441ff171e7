"""A whole run: its folder, its data, the loop, and an end that loses nothing."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from moesys.checkpoint import Checkpointer, list_checkpoints, load_newest
from moesys.config import RunConfig
from moesys.configuration import load_saved, to_toml
from moesys.data import Data, Tokenizer, open_data
from moesys.models.count import count_parameters
from moesys.training.evaluate import Evaluation
from moesys.training.folder import create_run_folder, lock, write_whole, writing
from moesys.training.loop import Loop, RunState
from moesys.training.messages import conclusion, introduction, stopped
from moesys.training.metrics import MetricsFile, strict
from moesys.training.progress import TrainingProgress
from moesys.training.recorders import Recorders
from moesys.training.signals import StopSignals
from moesys.training.trainer import Trainer


def train(config: RunConfig) -> Path:
    """Train from the start; returns the run folder."""
    device = pick_device(config)
    data = open_run_data(config)
    trainer = Trainer(config, device)
    folder, config, handle = create_run_folder(config, data.tokenizer)
    with handle:
        Run(folder, config, data, trainer).go()
    return folder


def resume(folder: Path, overrides: list[str]) -> Path:
    """Go on from the newest whole checkpoint of a run, with command-line overrides on top of its configuration.

    The overrides become part of the run's configuration.
    """
    config = load_saved(folder, overrides, check_machine=True)
    folder = folder.parent if folder.is_file() else folder
    with writing(folder, "make it writable, or go on with a copy of it"):
        handle = lock(folder)
    with handle:
        device = pick_device(config)
        data = open_run_data(config, Tokenizer.load(folder / "tokenizer.json"))
        run = Run(folder, config, data, Trainer(config, device))
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


def open_run_data(config: RunConfig, tokenizer: Tokenizer | None = None) -> Data:
    """The text of a run; a resumed run brings its tokenizer."""
    return open_data(
        config.data,
        vocab_size=config.model.vocab_size,
        sequence_length=config.training.sequence_length,
        seed=config.training.seed,
        tokenizer=tokenizer,
    )


class Run:
    """A run in this process, which holds the folder's lock."""

    def __init__(self, folder: Path, config: RunConfig, data: Data, trainer: Trainer) -> None:
        self.folder, self.config, self.data, self.trainer = folder, config, data, trainer
        self.state = RunState(data=data.description)
        self.saved_step = -1

    def restore(self) -> None:
        """Fill model and optimiser from the newest whole checkpoint; start over when none was ever written.

        Raises ValueError when there are checkpoints but none can be used, or when they are past the last step.
        """
        checkpoints = self.folder / "checkpoints"
        if list_checkpoints(checkpoints):
            path, state, skipped = load_newest(checkpoints, self.trainer.tensors())
            for message in skipped:
                print(message)
            self.state = RunState(**state)
            if self.state.step > self.config.training.steps:
                raise ValueError(
                    f"training.steps = {self.config.training.steps}: {path} has {self.state.step} steps behind it; "
                    "give as many to evaluate it once more, or more to go on"
                )
            self.trainer.loaded(self.state.step)
            self.saved_step = self.state.step
            print(f"resuming from {path}")
        else:
            print(f"{self.folder} has no checkpoint yet: starting from step 0")
        if self.state.data != self.data.description:
            print(f"the text is not what it was before: {self.state.data}")
            self.state.data = self.data.description
        self._keep_configuration()

    def go(self) -> None:
        """Train to the last step, evaluate, and say what to do next."""
        state, checkpoint = self.state, self.config.checkpoint
        written = state.step - (state.pending is not None)
        with ExitStack() as stack:
            stop = stack.enter_context(StopSignals())  # before anything is said that somebody may answer
            print(introduction(self.folder, self.config, self.data.description, self.trainer.device), flush=True)
            metrics = MetricsFile(self.folder / "metrics.jsonl", keep_steps=written)
            stack.callback(metrics.close)
            recorders = Recorders(self.config, self.folder)
            stack.callback(recorders.close)
            saver = Checkpointer(
                self.folder / "checkpoints", keep=checkpoint.keep, asynchronous=checkpoint.asynchronous
            )
            stack.callback(saver.close)
            if state.step < self.config.training.steps:
                (self.folder / "summary.json").unlink(missing_ok=True)
            with TrainingProgress(state.step, self.config.training.steps) as progress:
                loop = Loop(
                    folder=self.folder,
                    config=self.config,
                    data=self.data,
                    trainer=self.trainer,
                    state=state,
                    saved_step=self.saved_step,
                    metrics=metrics,
                    recorders=recorders,
                    saver=saver,
                    stop=stop,
                    progress=progress,
                )
                final = loop.run()
            if final is not None:
                self._conclude(final)
            elif stop.received is not None:
                print(stopped(self.folder, stop.received, state.step))

    def _keep_configuration(self) -> None:
        """Make what this session runs with the run's configuration, so that the next one goes on with it too."""
        file, text = self.folder / "config.toml", to_toml(self.config)
        if file.read_text(encoding="utf-8") != text:
            with writing(file, "make it writable, or go on with a copy of the run"):
                write_whole(file, text)

    def _conclude(self, final: Evaluation) -> None:
        count = count_parameters(self.config.model)
        summary: dict[str, Any] = {
            "steps": self.state.step,
            "tokens": self.state.tokens,
            "seconds": self.state.seconds,
            "eval_loss": final.loss,
            "eval_bits_per_byte": final.bits_per_byte,
            "eval_tokens": final.tokens,
            "eval_bytes": final.num_bytes,
            "xz_bits_per_byte": self.data.xz_bits_per_byte(),
            "parameters": count.total,
            "active_parameters": count.active,
        }
        file = self.folder / "summary.json"
        with writing(
            file, f"everything else is saved; see to that, then `moesys train --resume {self.folder}`"
        ):
            write_whole(file, json.dumps(strict(summary), indent=1, allow_nan=False) + "\n")
        print(conclusion(self.folder, summary, exact_bytes=final.exact_bytes))
