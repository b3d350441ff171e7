"""scripts/train.py: the same numbers as `moesys train`, and a folder that everything else works with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moesys
from moesys import cli
from moesys.testing.runs import final_tensors, options, run, summary

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SCRIPT = Path(moesys.__path__[0]).parent / "scripts" / "train.py"


@pytest.mark.skipif(not SCRIPT.exists(), reason="a wheel has no scripts")
def test_the_script(tmp_path, capsys):
    changes = {"training__micro_batch_size": 2, "training__steps": 25, "model__mtp_depth": 1}
    command, script = tmp_path / "command", tmp_path / "script"
    assert run(tmp_path / "log", options(command, **changes)) == 0
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options(script, **changes)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)", done.stdout)
    rows = {
        r["step"]: r for r in map(json.loads, (command / "run" / "metrics.jsonl").read_text().splitlines())
    }
    assert [int(step) for step, _, _ in printed] == [10, 20, 25]
    for step, loss, norm in printed:
        assert (loss, norm) == (f"{rows[int(step)]['loss']:.4f}", f"{rows[int(step)]['grad_norm']:.3f}")
    theirs, ours = final_tensors(command / "run"), final_tensors(script / "run")
    assert theirs.keys() == ours.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert f"held-out: {summary(command / 'run')['eval_bits_per_byte']:.4f} bits per byte" in done.stdout

    assert run(tmp_path / "log", ["--resume", str(script / "run")]) == 0
    assert summary(script / "run") == summary(command / "run")
    assert cli.main(["generate", str(script / "run"), "--prompt", "def ", "--max-new-tokens", "3"]) == 0
    assert "def " in capsys.readouterr().out


def test_an_existing_run_is_refused_before_it_is_trained(tmp_path):
    assert run(tmp_path / "log", options(tmp_path, training__steps=1)) == 0
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"train.py: run_dir {tmp_path}/run holds a run already")
    assert "step" not in done.stdout
