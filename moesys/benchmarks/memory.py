"""Peak memory of one side of the training-step benchmark, in a process that the other side cannot add to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import psutil
import torch
from torch import Tensor

from moesys import machine
from moesys.benchmarks.contender import Contender, time_step
from moesys.models.config import ModelConfig

Build = Callable[[ModelConfig], Contender]


def peak_memory_alone(build: Build, config: ModelConfig, batches: list[Tensor]) -> int:
    """Bytes that building a model and a training step on each of `batches` add to a process, at their peak.

    `build` must pickle. A step of a very small model comes first, so that what Python, the imports and the
    libraries take on their first use is resident before the count begins.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure, build, config, batches, torch.get_num_threads()).result()


def _measure(build: Build, config: ModelConfig, batches: list[Tensor], threads: int) -> int:
    torch.set_num_threads(threads)
    small = replace(config, vocab_size=8, num_layers=2, d_expert=8)
    _train(build(small), [batches[0][:1, :2].clamp(max=7)])
    machine.reset_peak_memory()
    before = psutil.Process().memory_info().rss
    _train(build(config), batches)
    return machine.peak_memory() - before


def _train(contender: Contender, batches: list[Tensor]) -> None:
    optimizer = contender.optimizer()
    for tokens in batches:
        time_step(contender, optimizer, tokens)
