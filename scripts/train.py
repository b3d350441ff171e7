"""Train a Mixture-of-Experts language model: the shortest complete use of the library.

    python scripts/train.py --training.steps 200 --model.num-experts 32

takes the same configuration as `moesys train` and gives the same numbers; that command adds live progress,
checkpoints on the way, resuming, and an orderly end on a signal.
"""

from __future__ import annotations

import sys
from pathlib import Path

from moesys.checkpoint import Checkpointer
from moesys.configuration import load_run_config
from moesys.data import open_data
from moesys.training.evaluate import evaluate
from moesys.training.folder import create_run_folder
from moesys.training.run import micro_batches, pick_device
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
    print(data.description)

    trainer = Trainer(config, pick_device(config))
    tokens = 0
    while trainer.step < training.steps:
        result = trainer.train_step(micro_batches(data.train, config, trainer.step, trainer.device))
        tokens += result.tokens
        if trainer.step % 10 == 0:
            print(f"step {trainer.step}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}", flush=True)

    found = evaluate(
        trainer.model,
        data.validation,
        sequence_length=training.sequence_length,
        batch_size=training.micro_batch_size,
    )
    print(f"held-out: {found.bits_per_byte:.4f} bits per byte (xz -9: {data.xz_bits_per_byte():.4f})")

    folder, _ = create_run_folder(config)
    data.tokenizer.save(folder / "tokenizer.json")
    saver = Checkpointer(folder / "checkpoints", keep=1, asynchronous=False)
    saver.save(trainer.step, trainer.tensors(), {"step": trainer.step, "tokens": tokens})
    saver.close()
    print(f"saved {folder}; try: moesys generate {folder} --prompt 'def '")


if __name__ == "__main__":
    main(sys.argv[1:])
