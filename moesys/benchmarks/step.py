"""`moesys bench step`: a whole training step, against the same model in `transformers`.

Both models live in this process and take turns (A B A B ...), so that both meet the same machine.
Peak memory is measured afterwards, for each in a process of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
import tyro
from torch import Tensor

from moesys import machine
from moesys.benchmarks.contender import Contender, draw_tokens, imbalance, time_step
from moesys.benchmarks.families import FAMILIES
from moesys.benchmarks.flops import step_flops
from moesys.benchmarks.memory import peak_memory_alone
from moesys.benchmarks.moesys_model import moesys_contender
from moesys.benchmarks.step_results import FamilyResult, SideResult, Spread, summary, write_json
from moesys.benchmarks.transformers_models import Implementation, find_best, transformers_contender
from moesys.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Time a whole training step of this project's models and of the same models in transformers."""

    families: tuple[Literal["deepseek-v3", "mixtral", "qwen3-moe"], ...] = (
        "deepseek-v3",
        "mixtral",
        "qwen3-moe",
    )
    """Architectures to compare."""
    rounds: int = 10
    """Rounds; in each, both sides take `steps` steps and the rate of matrix products is measured."""
    steps: int = 2
    """Steps of one side before it is the other's turn."""
    batch: int = 4
    """Sequences of a step."""
    sequence: int = 256
    """Tokens of a sequence."""
    threads: int = 0
    """CPU threads of PyTorch; 0 leaves its choice."""
    seed: int = 0
    """Key of the parameters and the tokens."""
    json: str = ""
    """File for the results and for what they were measured on and with; "" writes none."""

    def problems(self) -> list[str]:
        """Every value out of range, each with the rule, the value and a way out."""
        least = {"rounds": 1, "steps": 1, "batch": 1, "sequence": 2, "threads": 0}
        found = [
            f"--{name} is at least {bound}; {getattr(self, name)} came: leave it out for the default"
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]
        if not self.families:
            found.append(f"--families is empty: name at least one of {', '.join(FAMILIES)}")
        if self.json and not Path(self.json).absolute().parent.is_dir():
            found.append(f"--json {self.json}: its folder does not exist; make it first or name another")
        return found


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark as the command line asks, print a table, write the JSON file; returns 0.

    Raises ValueError for options out of range or without transformers, OSError for a file it cannot write.
    """
    options = tyro.cli(StepOptions, args=list(arguments), prog="moesys bench step")
    if problems := options.problems():
        raise ValueError("\n".join(problems))
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "this compares with transformers, which is not installed: pip install transformers"
        ) from error
    transformers.logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)
    described = machine.describe_machine()
    print(
        f"{described['processor']}, {described['cores']} cores, {described['threads']} threads, "
        f"{described['instructions']}; batch {options.batch} x {options.sequence}, float32, AdamW (fused)"
    )
    if described["load_average"] > 0.5 * described["cores"]:
        print(
            f"The machine is busy (load average {described['load_average']:.1f}): both sides are slower than they "
            "could be, and OpenMP's waiting threads slow each other; OMP_WAIT_POLICY=PASSIVE helps then."
        )
    results: dict[str, FamilyResult] = {}
    for family in options.families:
        results[family] = compare(family, FAMILIES[family](), options)
        print("\n" + "\n".join(summary(family, results[family])), flush=True)
        if options.json:
            write_json(Path(options.json), ["step", *arguments], described, results)
    return 0


def compare(family: str, config: ModelConfig, options: StepOptions) -> FamilyResult:
    """Measure `config` on both sides; `family` says which architecture of transformers it is."""
    batches = [
        draw_tokens(config.vocab_size, options.batch, options.sequence, seed)
        for seed in range(options.seed, options.seed + 4)
    ]
    build_theirs = partial(
        transformers_contender, family=family, sequence=options.sequence, seed=options.seed
    )
    chosen, trials = find_best(build_theirs(config, chosen=Implementation()), batches[0])
    builds = {
        "moesys": partial(moesys_contender, seed=options.seed),
        "transformers": partial(build_theirs, chosen=chosen),
    }
    contenders = {name: build(config) for name, build in builds.items()}
    parameters = {name: contender.num_parameters() for name, contender in contenders.items()}
    assert len(set(parameters.values())) == 1, f"the sides do not build the same model: {parameters}"

    rounds = take_turns(contenders, batches, options)
    flops = step_flops(config, options.batch, options.sequence)
    sides = {}
    for name, contender in contenders.items():
        seconds = [each.turns[name].seconds for each in rounds]
        sides[name] = SideResult(
            parameters=parameters[name],
            tokens_per_second=Spread.of([batches[0].numel() / each for each in seconds]),
            matmul_share=Spread.of([flops / each.turns[name].seconds / each.matmul_rate for each in rounds]),
            peak_memory_bytes=peak_memory_alone(builds[name], config, batches[:3]),
            imbalance=imbalance(contender.loads(batches[0])),
            first_loss=rounds[0].turns[name].first_loss,
            last_loss=rounds[-1].turns[name].last_loss,
        )
    ratios = [each.turns["transformers"].seconds / each.turns["moesys"].seconds for each in rounds]
    return FamilyResult(
        config=config,
        flops_per_step=flops,
        matmul_rate=Spread.of([each.matmul_rate for each in rounds]),
        moesys=sides["moesys"],
        transformers=sides["transformers"],
        implementation=chosen,
        trials=trials,
        speed_ratios=ratios,
        speed_ratio=Spread.of(ratios),
        memory_ratio=sides["moesys"].peak_memory_bytes / sides["transformers"].peak_memory_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One side's steps in one round."""

    seconds: float
    """Mean seconds of a step."""
    first_loss: float
    last_loss: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: each side's turn, and the machine's speed in the same moments."""

    matmul_rate: float
    """FLOP/s of large float32 matrix products."""
    turns: dict[str, Turn]
    """By side."""


def take_turns(contenders: dict[str, Contender], batches: list[Tensor], options: StepOptions) -> list[Round]:
    """Time both sides in turns on the same batches in the same order, after two steps each that do not count.

    Raises RuntimeError for a loss that is not finite: such a step is no measurement.
    """
    optimizers = {name: contender.optimizer() for name, contender in contenders.items()}
    for name, contender in contenders.items():
        for tokens in batches[:2]:
            time_step(contender, optimizers[name], tokens)
    rounds = []
    for index in range(options.rounds):
        rate, turns = machine.matmul_rate(), {}
        for name, contender in contenders.items():
            steps = range(index * options.steps, (index + 1) * options.steps)
            timed = [time_step(contender, optimizers[name], batches[step % len(batches)]) for step in steps]
            seconds, losses = zip(*timed, strict=True)
            if not all(map(math.isfinite, losses)):
                raise RuntimeError(f"{name}: the loss of a timed step is not finite: {losses}")
            turns[name] = Turn(seconds=fmean(seconds), first_loss=losses[0], last_loss=losses[-1])
        rounds.append(Round(matmul_rate=rate, turns=turns))
    return rounds
