"""One small run, trained for a few steps, that all tests here load."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesys.configuration import load_run_config
from moesys.training.run import train

LINES = "def f{i}_{j}(x):\n    return x + {j}  # naïve – größe 漢字 🙂\n"
MODEL = {
    "vocab-size": 300,
    "d-model": 32,
    "num-layers": 2,
    "num-heads": 2,
    "kv-lora-rank": 16,
    "qk-nope-head-dim": 8,
    "qk-rope-head-dim": 8,
    "v-head-dim": 8,
    "d-ff": 48,
    "num-experts": 4,
    "top-k": 2,
    "d-expert": 16,
}


def train_small(folder: Path, *options: str) -> Path:
    """Train in folder / "run" on text in folder / "text"; checkpoints of steps 2, 4 and 6."""
    text = folder / "text"
    text.mkdir()
    for i in range(12):
        (text / f"{i}.txt").write_text("".join(LINES.format(i=i, j=j) for j in range(20)), encoding="utf-8")
    arguments = [word for name, value in MODEL.items() for word in (f"--model.{name}", str(value))]
    arguments += ["--run-dir", str(folder / "run"), "--data.source", str(text), "--data.held-out", "0.3"]
    arguments += ["--data.cache", str(folder / "cache"), "--training.steps", "6", "--training.device", "cpu"]
    arguments += ["--training.batch-size", "4", "--training.micro-batch-size", "4"]
    arguments += [
        "--training.sequence-length",
        "32",
        "--optimizer.warmup-share",
        "0.33",
        "--optimizer.lr",
        "0.01",
    ]
    arguments += ["--checkpoint.interval", "2", "--checkpoint.keep", "3", "--logging.no-tensorboard"]
    return train(load_run_config(None, [*arguments, *options]))


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run; not to be changed."""
    return train_small(tmp_path_factory.mktemp("small"))
