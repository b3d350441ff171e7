"""Functions in other processes, for tests: ranks that form a gloo group, and single ones to be killed."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GRACE = 5.0  # seconds that the other ranks have to end by themselves once one has failed


def fork_server(*modules: str) -> ForkServerContext:
    """Context whose processes start in milliseconds: one server imports the modules once and then forks.

    The first call in a process decides which modules those are; others are imported by each new process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch.distributed.tensor", *modules])
    return context


def run_ranks(
    function: Callable[..., None],
    num_ranks: int,
    *args: Any,
    timeout: float = 60.0,
    modules: Sequence[str] = (),
) -> None:
    """Run `function(*args)` on ranks that form a gloo group, with a rendezvous in a temporary file.

    The function must be importable by name (put it in `moesys/testing/`). Raises AssertionError with the
    tracebacks of the ranks that failed, or if they are not done within `timeout` seconds; no process is left.
    """
    context = fork_server(*modules)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_rank, args=(function, rank, num_ranks, folder, timeout, args), daemon=True
            )
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        try:
            late = _join(ranks, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        reports = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        reports += [f"rank {rank} is not done after {timeout} s" for rank in late]
        codes = [process.exitcode for process in ranks]
        if reports or any(codes):
            raise AssertionError("\n".join([*reports, f"exit codes {codes}"]))


def _join(ranks: list[ForkServerProcess], timeout: float) -> list[int]:
    end = time.monotonic() + timeout
    while (alive := [process for process in ranks if process.is_alive()]) and time.monotonic() < end:
        wait([process.sentinel for process in alive], end - time.monotonic())
        if any(process.exitcode for process in ranks):
            end = min(end, time.monotonic() + _GRACE)
    return [rank for rank, process in enumerate(ranks) if process.is_alive()]


def _rank(
    function: Callable[..., None], rank: int, num_ranks: int, folder: str, timeout: float, args: tuple
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout),
        )
        function(*args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
