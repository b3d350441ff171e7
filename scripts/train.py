"""Train a Mixture-of-Experts language model: the shortest complete use of the library.

    python scripts/train.py --training.steps 200 --model.num-experts 32

takes the same configuration as `moesys train` and gives the same numbers; that command adds live progress,
metrics.jsonl, checkpoints on the way, and an orderly end on a signal. Its --resume goes on with a run of this
script as well.
It skips the update of a step that is not finite, as the command does, but goes on however many there are.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from moesys.checkpoint import Checkpointer
from moesys.configuration import load_run_config
from moesys.data import open_data
from moesys.training.evaluate import evaluate
from moesys.training.folder import create_run_folder
from moesys.training.loop import RunState, micro_batches
from moesys.training.run import pick_device
from moesys.training.trainer import Trainer


def main(arguments: list[str]) -> None:
    """Configuration, data, model, loop, evaluation, checkpoint."""
    toml = Path(arguments.pop(0)) if arguments and arguments[0].endswith(".toml") else None
    config = load_run_config(toml, arguments)
    training = config.training
    data = open_data(
        config.data,
        vocab_size=config.model.vocab_size,
        sequence_length=training.sequence_length,
        seed=training.seed,
    )
    trainer = Trainer(config, pick_device(config))
    folder, config, handle = create_run_folder(config, data.tokenizer)
    print(f"{folder}: {data.description}")

    state = RunState(data=data.description)
    while state.step < training.steps:
        batches = micro_batches(data.train, config, state.samples, trainer.device)
        result = trainer.train_step(batches)
        state.step += 1
        state.samples += training.batch_size
        state.tokens += result.tokens
        if state.step % 10 == 0 or state.step == training.steps:
            print(
                f"step {state.step}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}", flush=True
            )

    saver = Checkpointer(folder / "checkpoints", keep=1, asynchronous=False)
    saver.save(state.step, trainer.tensors(), asdict(state))
    saver.close()
    found = evaluate(
        trainer.model,
        data.validation,
        sequence_length=training.sequence_length,
        batch_size=training.micro_batch_size,
        chunk=training.loss_chunk,
        cross_document_attention=config.data.cross_document_attention,
    )
    print(f"held-out: {found.bits_per_byte:.4f} bits per byte (xz -9: {data.xz_bits_per_byte():.4f})")
    print(f"saved {folder}; try: moesys generate {folder} --prompt 'def '")
    handle.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {error}")
