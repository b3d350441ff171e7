"""`moesys eval` as a user runs it."""

from __future__ import annotations

import json
import math
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import torch

from moesys import cli
from moesys.evaluation import main
from moesys.loading import load_run


def figures(tmp_path: Path, *arguments: object) -> dict:
    file = tmp_path / "figures.json"
    assert main([*map(str, arguments), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_by_default_it_is_the_evaluation_at_the_end_of_training(run: Path, tmp_path: Path) -> None:
    found = figures(tmp_path, run)
    summary = json.loads((run / "summary.json").read_text())
    assert found["loss"] == summary["eval_loss"]
    assert found["bits_per_byte"] == summary["eval_bits_per_byte"]
    assert (found["tokens"], found["bytes"]) == (summary["eval_tokens"], summary["eval_bytes"])
    assert found["xz_bits_per_byte"] == summary["xz_bits_per_byte"]


def test_the_figures_are_those_of_a_plain_loop(run: Path, tmp_path: Path) -> None:
    """One document, in windows of 16 tokens that begin anew, summed by hand from whole logits."""
    text = "def größe(x):\n    return x + 1  # 漢字 🙂\n" * 3
    (tmp_path / "text.txt").write_bytes(text.encode())
    found = figures(tmp_path, run, "--data", tmp_path / "text.txt", "--sequence-length", 16)
    loaded = load_run(run)
    tokens = [loaded.tokenizer.eot_id, *loaded.tokenizer.encode(text)]
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 16):
            window = torch.tensor([tokens[start : start + 17]])
            inputs = window[:, :-1]
            positions = torch.arange(inputs.shape[1]).unsqueeze(0)
            logits = loaded.model.logits(inputs, positions, torch.zeros_like(inputs))[0].double()
            chosen = logits.log_softmax(-1).gather(1, window[0, 1:, None])
            nats -= float(chosen.sum())
    assert found["tokens"] == len(tokens) - 1
    assert found["bytes"] == len(text.encode())
    assert found["loss"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-6)


def test_what_is_printed_is_what_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(tmp_path, run, "--max-tokens", 500)
    out = capsys.readouterr().out
    assert f"{run}, step 6" in out and "held-out text of" in out
    assert f"{found['tokens']:,}, {found['bytes']:,.0f} bytes" in out
    assert f"{found['loss']:.4f} nats per token" in out
    assert f"{found['bits_per_byte']:.4f} bits per byte" in out
    assert f"xz -9    {found['xz_bits_per_byte']:.4f} bits per byte" in out
    assert 500 - 32 < found["tokens"] <= 500


def test_the_file_says_where_the_figures_come_from(run: Path, tmp_path: Path) -> None:
    found = figures(tmp_path, run, "--checkpoint", 2)
    assert (found["run"], found["step"], found["sequence_length"]) == (str(run), 2, 32)
    assert found["command"][:3] == ["moesys", "eval", str(run)]
    assert found["versions"]["torch"] and found["versions"]["python"]
    assert datetime.fromisoformat(found["date"]).tzinfo is not None
    assert found["loss"] != figures(tmp_path, run)["loss"]


def test_other_formats(run: Path, tmp_path: Path) -> None:
    text = "def f(x):\n    return x\n"
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"body": text}) + "\n")
    plain = figures(tmp_path, run, "--data", tmp_path / "text.txt")
    rows = figures(tmp_path, run, "--data", tmp_path / "rows.jsonl", "--text-field", "body")
    assert (plain["loss"], plain["bytes"]) == (rows["loss"], rows["bytes"])


def test_longer_sequences_than_in_training_are_noted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole text in one window is predicted too, and with more to go by the loss differs."""
    long = figures(tmp_path, run, "--sequence-length", 4096)
    assert "sequences of 4,096 tokens; the model was trained on 32" in capsys.readouterr().err
    short = figures(tmp_path, run)
    assert long["tokens"] == short["tokens"] and long["loss"] != short["loss"]


def test_a_run_whose_text_is_gone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    config = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(config.replace(str(run.parent / "text"), str(tmp_path / "gone")))
    assert cli.main(["eval", str(copy)]) == 2
    err = capsys.readouterr().err
    assert "trained on is not here" in err and "--data PATH" in err
    (tmp_path / "text.txt").write_text("def f(x):\n")
    assert cli.main(["eval", str(copy), "--data", str(tmp_path / "text.txt")]) == 0


@pytest.mark.parametrize("content", ["", "\n"])
def test_text_with_almost_nothing_in_it(
    run: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(content)
    status = cli.main(["eval", str(run), "--data", str(tmp_path / "text.txt")])
    captured = capsys.readouterr()
    assert status == (0 if content else 2)
    assert "Traceback" not in captured.err and (content or captured.err)


def test_every_mistake_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = ["--sequence-length", "0", "--max-tokens", "-1", "--text-field", "x"]
    assert cli.main(["eval", "no-run", *bad, "--json", str(tmp_path / "absent" / "x.json")]) == 2
    err = capsys.readouterr().err
    for option in ("--sequence-length", "--max-tokens", "--format and --text-field", "--json"):
        assert f"  - {option}" in err
    assert cli.main(["eval", "no-run", "--json", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert cli.main(["eval", str(tmp_path / "no-run")]) == 2
    assert "name a run folder" in capsys.readouterr().err
