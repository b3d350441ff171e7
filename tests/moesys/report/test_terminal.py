"""`moesys inspect`, and the folders that are no runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesys.report import main as report
from moesys.report.terminal import main

WriteRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def inspect(capsys: pytest.CaptureFixture[str], *runs: Path) -> str:
    assert main(list(map(str, runs))) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_one_run(tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    text = inspect(capsys, write_run(tmp_path / "tiny-deepseek-001", steps=500))
    assert text.startswith("tiny-deepseek-001: ended after 500 steps\n")
    assert "12% fewer than the 1.802" in text
    assert re.search(r"Active parameters +5.62 M", text)
    assert re.search(r"Preset +tiny-deepseek\b", text)
    for title in ("Training loss", "Held-out bits per byte", "Gradient norm", "Tokens per second"):
        assert f"\n{title}" in text
    chart = text.split("\nTraining loss (nats")[1].splitlines()[1:6]
    assert chart[0].count("█") < chart[3].count("█")  # the loss falls: fewer columns reach the top
    assert re.search(r"step 1 +500", chart[4])


def test_expert_table(tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    def fixed(line: dict[str, Any]) -> None:
        line["experts"]["3"] = {
            "share": [0.5, 0.25, 0.25, 0.0], "max_violation": 1.0, "entropy": 1.0397207708,
            "dropped_share": 0.125, "dead": 1,
        }  # fmt: skip

    text = inspect(capsys, write_run(tmp_path / "run", steps=40, layers=(3,), num_experts=4, change=fixed))
    assert "mean of the last 2 steps" in text
    assert re.search(r"\n +3 +1.00 +0.750 +1 +12.50% +█▄▄·", text)


def test_many_experts_fold(tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    text = inspect(capsys, write_run(tmp_path / "run", steps=3, layers=(1,), num_experts=128))
    table = text.split("Load of each expert")[1]
    bars = [line for line in table.splitlines() if re.search(r"[▁▂▃▄▅▆▇█·]{20}", line)]
    assert sum(len(re.findall(r"[▁▂▃▄▅▆▇█·]", line)) for line in bars) == 128


def test_several_runs(tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write_run(tmp_path / "a", steps=100, lr=1e-3),
        write_run(tmp_path / "b", steps=50, planned=100, ended=False),
        write_run(tmp_path / "c-with-a-name-too-long-for-any-column", steps=10, layers=()),
    ]
    text = inspect(capsys, *runs)
    assert re.search(r"optimizer.lr +0.001 +0.003 +0.003", text)
    assert text.count("Expert load of") == 2
    a, b = (
        re.search(rf"\n{name} +([▁▂▃▄▅▆▇█]+) +\S+ → \S+", text.split("Training loss (")[1]) for name in "ab"
    )
    assert a and b
    assert len(a[1]) == 2 * len(b[1])  # twice the steps, twice the columns


@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_one_step_and_nothing_finite(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str], layers: tuple[int, ...]
) -> None:
    def lose(line: dict[str, Any]) -> None:
        line |= dict.fromkeys(set(line) - {"step", "tokens", "experts"})
        for layer in line["experts"].values():
            layer |= dict.fromkeys(set(layer) - {"share"}) | {"share": [None] * 16}

    one = write_run(tmp_path / "one", steps=1, layers=layers, ended=False)
    lost = write_run(tmp_path / "lost", steps=2, layers=layers, ended=False, change=lose)
    assert "Training loss (" in inspect(capsys, one)
    assert "2 steps had a loss" in inspect(capsys, lost)
    inspect(capsys, one, lost)
    assert ("Expert load" in inspect(capsys, one)) == bool(layers)


def test_through_a_pipe(tmp_path: Path, write_run: WriteRun) -> None:
    run = write_run(tmp_path / "run", steps=20)
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    code = "import sys; from moesys.report.terminal import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, env=environment, timeout=60, check=True
    )
    text = done.stdout.decode()
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80
    assert done.stderr == b""


@pytest.mark.parametrize("command", [main, report])
class TestFoldersThatAreNoRuns:
    def test_a_parent_folder_names_the_runs_in_it(
        self, command: Callable[[list[str]], int], tmp_path: Path, write_run: WriteRun
    ) -> None:
        run = write_run(tmp_path / "runs" / "good", steps=2)
        for folder in (tmp_path, tmp_path / "runs", run / "checkpoints"):
            with pytest.raises(
                OSError, match=r"is what `moesys train` writes: config\.toml, .*near it: "
            ) as error:
                command([str(folder)])
            assert str(run) in str(error.value)

    def test_a_misspelt_name_gets_the_most_similar_first(
        self, command: Callable[[list[str]], int], tmp_path: Path, write_run: WriteRun
    ) -> None:
        for name in ("aaa-001", "tiny-dense-001", "tiny-dense-002"):
            write_run(tmp_path / name, steps=2)
        with pytest.raises(OSError, match=r"does not exist.* near it: \S+tiny-dense-002, "):
            command([str(tmp_path / "tiny-dnse-002")])

    def test_what_is_missing_or_broken_is_named(
        self, command: Callable[[list[str]], int], tmp_path: Path, write_run: WriteRun
    ) -> None:
        run = write_run(tmp_path / "run", steps=2)
        (run / "summary.json").write_text("{")
        with pytest.raises(ValueError, match=r"summary\.json is not JSON"):
            command([str(run)])
        (run / "summary.json").write_text("[]")
        with pytest.raises(ValueError, match=r"summary\.json does not hold a JSON object"):
            command([str(run)])
        (run / "summary.json").unlink()
        (run / "config.toml").write_text("a = ")
        with pytest.raises(ValueError, match=r"config\.toml is not TOML"):
            command([str(run)])
        (run / "config.toml").write_text("")
        (run / "metrics.jsonl").write_text("")
        with pytest.raises(ValueError, match="no whole line"):
            command([str(run)])
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
        with pytest.raises(ValueError, match="line 1: lacks 'tokens'"):
            command([str(run)])
        (run / "metrics.jsonl").unlink()
        with pytest.raises(OSError, match=r"has no metrics\.jsonl"):
            command([str(run)])

    def test_no_run_and_the_same_run_twice(
        self, command: Callable[[list[str]], int], tmp_path: Path, write_run: WriteRun
    ) -> None:
        run = write_run(tmp_path / "run", steps=2)
        with pytest.raises(ValueError, match="no run was given"):
            command([])
        with pytest.raises(ValueError, match="given twice"):
            command([str(run), str(run.parent / "." / "run")])
