"""`moesys generate`: continue prompts with a trained model."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from moesys.generation.sampling import Sampling
    from moesys.loading import LoadedRun

Repeated = tyro.conf.UseAppendAction


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """Continue prompts with a trained model. Text goes to stdout as it comes, everything else to stderr."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, as `moesys train` writes it."""
    prompt: Annotated[tuple[str, ...], Repeated, tyro.conf.arg(metavar="TEXT")] = ()
    """Text to continue; may be given several times. With none at all, the model begins a document of its own.
    One that begins with a dash needs an equals sign (--prompt="--x")."""
    prompt_file: Annotated[tuple[Path, ...], Repeated, tyro.conf.arg(metavar="FILE")] = ()
    """UTF-8 file whose whole content is a prompt; may be given several times."""
    max_new_tokens: int = 200
    """Tokens after which a continuation ends that has not ended by itself."""
    temperature: float = 0.8
    """Logits are divided by it: below 1 favours likely tokens, 0 always takes the most likely one."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Draw among this many of the most likely tokens."""
    top_p: float = 1.0
    """Draw among the fewest of the most likely tokens that together have this probability."""
    seed: int = 0
    """Key of the random draws: the same seed gives the same text."""
    checkpoint: Annotated[int | None, tyro.conf.arg(metavar="STEP")] = None
    """Step of the checkpoint to take; the newest whole one by default."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; "auto" takes a GPU if there is one."""

    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        from moesys.generation.sampling import Sampling

        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)

    def read_prompts(self) -> tuple[list[str], list[str]]:
        """The prompts, at least one, in the order of --prompt and then --prompt-file; and what is wrong with them."""
        prompts, problems = [], []
        for text in self.prompt:
            try:
                text.encode()
            except UnicodeEncodeError:
                problems.append(f"--prompt {text!r} is not UTF-8; convert it first")
            prompts.append(text)
        for path in self.prompt_file:
            try:
                prompts.append(path.read_bytes().decode())
            except OSError as error:
                problems.append(
                    f"--prompt-file {path} cannot be read ({error.strerror}); name a text file that can"
                )
            except UnicodeDecodeError as error:
                problems.append(
                    f"--prompt-file {path} is not UTF-8 ({error.reason} at byte {error.start}); convert it first"
                )
        return prompts or [""], problems


def main(arguments: Sequence[str]) -> int:
    """Print prompts with their continuations, token by token, and the speed on stderr; returns an exit status.

    Raises ValueError with every option that is out of range, and for a run that cannot be used; OSError for a
    folder that is not there.
    """
    options = tyro.cli(GenerateArguments, args=list(arguments), prog="moesys generate")
    prompts, problems = options.read_prompts()
    problems += options.sampling().problems()
    if options.max_new_tokens < 1:
        problems.append(f"--max-new-tokens is at least 1; {options.max_new_tokens} came: say how many to add")
    if problems:
        raise ValueError("\n  - ".join(["the command line cannot be followed:", *problems]))

    from moesys.loading import choose_device, load_run

    run = load_run(options.run, checkpoint=options.checkpoint, device=choose_device(options.device))
    for message in run.skipped:
        print(message, file=sys.stderr)
    return _run(run, prompts, options)


def _run(run: LoadedRun, prompts: Sequence[str], options: GenerateArguments) -> int:
    from moesys.generation.decode import generate
    from moesys.generation.transcript import Transcript

    tokens = [run.tokenizer.encode(prompt) for prompt in prompts]
    _note_length(run, max(map(len, tokens)) + options.max_new_tokens)
    transcript = Transcript(prompts, tokens, run.tokenizer, _show)
    begin = time.perf_counter()
    counts, ended, status = [0] * len(prompts), 0, 0
    try:
        for prompt, token in generate(
            run.model,
            tokens,
            end_of_text=run.tokenizer.eot_id,
            vocab_size=run.tokenizer.vocab_size,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling(),
        ):
            transcript.add(prompt, token)
            counts[prompt] += 1
            ended += token == run.tokenizer.eot_id
            if counts[prompt] == options.max_new_tokens:
                transcript.finish(prompt)
    except KeyboardInterrupt:
        status = 130
    transcript.finish_all()
    seconds, total = time.perf_counter() - begin, sum(counts)
    print(
        f"step {run.step}: {total:,} tokens in {seconds:.2f} s, {total / seconds:,.0f} tokens per second; "
        f"{ended} of {len(prompts)} ended by the model" + ("; stopped by Ctrl-C" if status else ""),
        file=sys.stderr,
    )
    return status


def _note_length(run: LoadedRun, positions: int) -> None:
    trained = run.config.training.sequence_length
    if positions > trained:
        print(
            f"note: the model may have to look back over {positions:,} tokens; it was trained on {trained:,} at a "
            "time and may lose the thread beyond them",
            file=sys.stderr,
        )


def _show(text: str) -> None:
    """Print at once; what the terminal's encoding lacks becomes a question mark."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)
