"""`moesys eval`: loss and bits per byte of a trained model on any text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from moesys.data import TokenDataset
    from moesys.loading import LoadedRun
    from moesys.training.evaluate import Evaluation

XZ_TOKENS = 2_000_000
"""Longer text gets no figure of xz: it would take more than some seconds."""


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments:
    """Measure a trained model on its held-out text or on any other. Lower bits per byte are better."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, as `moesys train` writes it."""
    data: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """Text to measure on, a file or a folder; by default the run's held-out text, all of it."""
    format: Literal["auto", "text", "jsonl", "parquet", "datasets", "megatron"] = "auto"
    """Format of --data; "auto" goes by what the path holds."""
    text_field: str = "text"
    """Field or column of --data that holds the text in JSON lines, Parquet and datasets."""
    sequence_length: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Tokens that the model sees at a time; by default as many as in training."""
    max_tokens: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Measure on about this many tokens, spread evenly over the text; by default on all of it."""
    checkpoint: Annotated[int | None, tyro.conf.arg(metavar="STEP")] = None
    """Step of the checkpoint to take; the newest whole one by default."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; "auto" takes a GPU if there is one."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the same figures with what they were measured on and with."""

    def problems(self) -> list[str]:
        """Every value that will not do, each with the rule, the value and a way out."""
        found = [
            f"--{name} is at least 1; {value} came: leave it out for the default"
            for name, value in (("sequence-length", self.sequence_length), ("max-tokens", self.max_tokens))
            if value is not None and value < 1
        ]
        if not self.data and (self.format, self.text_field) != ("auto", "text"):
            found.append(
                "--format and --text-field say how --data is read, which is not given: add --data PATH"
            )
        if self.json is not None and self.json.is_dir():
            found.append(f"--json {self.json} is a folder; name the file to write in it")
        elif self.json is not None and not self.json.absolute().parent.is_dir():
            found.append(f"--json {self.json}: its folder does not exist; make it first or name another")
        return found


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line asks, print the figures, write the JSON file; returns an exit status.

    Raises ValueError with every option that will not do, and for a run or text that cannot be used; OSError for
    one that is not there or a file that cannot be written.
    """
    options = tyro.cli(EvaluateArguments, args=list(arguments), prog="moesys eval")
    if problems := options.problems():
        raise ValueError("\n  - ".join(["the command line cannot be followed:", *problems]))

    from moesys.loading import choose_device, load_run
    from moesys.training.folder import write_whole

    run = load_run(options.run, checkpoint=options.checkpoint, device=choose_device(options.device))
    for message in run.skipped:
        print(message, file=sys.stderr)
    dataset, title = open_dataset(run, options)
    print(f"run      {run.folder}, step {run.step}\ndata     {title}", flush=True)
    begin = time.perf_counter()
    found = measure(run, dataset, options.sequence_length, options.max_tokens)
    seconds = time.perf_counter() - begin
    yardstick = xz_figure(dataset, run)
    _print(found, yardstick, seconds)
    if options.json is not None:
        figures = _figures(run, options, title, found, yardstick)
        write_whole(options.json, json.dumps({**figures, **_origin(arguments)}, indent=1) + "\n")
    return 0


def open_dataset(run: LoadedRun, options: EvaluateArguments) -> tuple[TokenDataset, str]:
    """The text to measure on, tokenised with the run's tokenizer, and a line that says what it is."""
    from moesys.data import open_data, open_text

    config = run.config
    if options.data:
        dataset = open_text(
            options.data,
            run.tokenizer,
            format=options.format,
            text_field=options.text_field,
            cache=config.data.cache,
        )
        return dataset, f"{dataset.name}: {dataset.num_documents:,} documents"
    try:
        data = open_data(
            config.data,
            vocab_size=config.model.vocab_size,
            sequence_length=config.training.sequence_length,
            seed=config.training.seed,
            tokenizer=run.tokenizer,
        )
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the text that this run was trained on is not here ({error}); name text to measure on with --data PATH"
        ) from error
    dataset = data.validation
    return dataset, f"held-out text of {dataset.name}: {dataset.num_documents:,} documents"


def measure(
    run: LoadedRun, dataset: TokenDataset, sequence_length: int | None, max_tokens: int | None
) -> Evaluation:
    """Loss and bits per byte with a progress bar; by default exactly the evaluation at the end of training."""
    from moesys.training.evaluate import evaluate

    training = run.config.training
    length = sequence_length or training.sequence_length
    if length > training.sequence_length:
        print(
            f"note: sequences of {length:,} tokens; the model was trained on {training.sequence_length:,} at a time",
            file=sys.stderr,
        )
    total = dataset.num_tokens - 1
    with _progress(total if max_tokens is None else min(total, max(max_tokens, length))) as advance:
        return evaluate(
            run.model,
            dataset,
            sequence_length=length,
            # As many tokens at a time as in training, so that longer sequences take no more memory.
            batch_size=max(1, training.micro_batch_size * training.sequence_length // length),
            max_tokens=max_tokens,
            cross_document_attention=run.config.data.cross_document_attention,
            chunk=training.loss_chunk,
            on_batch=advance,
        )


def xz_figure(dataset: TokenDataset, run: LoadedRun) -> float | None:
    """Bits per byte that `xz -9` needs for the whole text; None for text that would take long."""
    from moesys.data.evaluation import dataset_xz_bits_per_byte

    if dataset.num_tokens > XZ_TOKENS:
        return None
    return dataset_xz_bits_per_byte(dataset, run.tokenizer)


def _print(found: Evaluation, yardstick: float | None, seconds: float) -> None:
    about = "" if found.exact_bytes else " (bytes estimated by document)"
    print(f"tokens   {found.tokens:,}, {found.num_bytes:,.0f} bytes{about}, {seconds:,.1f} s")
    print(f"loss     {found.loss:.4f} nats per token")
    print(f"result   {found.bits_per_byte:.4f} bits per byte")
    if yardstick is not None:
        print(f"xz -9    {yardstick:.4f} bits per byte for the whole text")


def _figures(
    run: LoadedRun, options: EvaluateArguments, title: str, found: Evaluation, yardstick: float | None
) -> dict[str, Any]:
    return {
        "run": str(run.folder),
        "step": run.step,
        "data": title,
        "sequence_length": options.sequence_length or run.config.training.sequence_length,
        "tokens": found.tokens,
        "bytes": found.num_bytes,
        "exact_bytes": found.exact_bytes,
        "loss": found.loss,
        "bits_per_byte": found.bits_per_byte,
        "xz_bits_per_byte": yardstick,
        "precision": str(run.model.embedding.dtype).removeprefix("torch."),
        "device": str(run.model.embedding.device),
    }


def _origin(arguments: Sequence[str]) -> dict[str, Any]:
    from moesys.training.folder import environment

    here = environment()
    return {
        "command": ["moesys", "eval", *arguments],
        "date": here["started"],
        "versions": {"python": here["python"], **here["packages"]},
        "commit": here["commit"],
        "platform": here["platform"],
        "threads": here["threads"],
    }


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that goes away at the end, counted in tokens; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("Evaluating {task.completed:,.0f}/{task.total:,.0f} tokens"),
        BarColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
