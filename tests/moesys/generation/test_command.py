"""`moesys generate` as a user runs it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moesys
from moesys import cli
from moesys.generation import main
from moesys.loading import load_run

ROOT = Path(moesys.__path__[0]).parent


def text_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def greedy(run: Path, prompt: str, count: int) -> str:
    """The continuation by the plain forward, without cache, batch or streaming."""
    loaded = load_run(run)
    tokenizer = loaded.tokenizer
    tokens = [tokenizer.eot_id, *tokenizer.encode(prompt)]
    start = len(tokens)
    with torch.no_grad():
        for _ in range(count):
            row = torch.tensor([tokens])
            logits = loaded.model.logits(row, torch.arange(len(tokens)).unsqueeze(0), torch.zeros_like(row))
            token = int(logits[0, -1, : tokenizer.vocab_size].argmax())
            if token == tokenizer.eot_id:
                break
            tokens.append(token)
    return tokenizer.decode(tokens[start:])


def test_greedy_text_is_that_of_the_plain_forward(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for prompt in ("def ", "größe 漢", ""):
        found = text_of(capsys, run, "--prompt", prompt, "--temperature", 0, "--max-new-tokens", 25)
        expected = prompt + greedy(run, prompt, 25)
        assert found == expected + ("" if expected.endswith("\n") else "\n")


def test_without_a_prompt_a_document_begins(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--temperature", 0, "--max-new-tokens", 9)
    assert text_of(capsys, run, *options) == text_of(capsys, run, "--prompt", "", *options)


def test_several_prompts_give_what_each_gives_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--temperature", 1, "--max-new-tokens", 20, "--seed", 3)
    prompts = ["def f(x):\n", "x", "return 漢"]
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    together = text_of(capsys, run, *arguments, *options)
    alone = [text_of(capsys, run, "--prompt", prompt, *options) for prompt in prompts]
    assert together == "".join(f"== {i} of 3 ==\n{text}" for i, text in enumerate(alone, start=1))


def test_seeds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (text_of(capsys, run, "--prompt", "def ", "--seed", seed) for seed in (1, 1, 2))
    assert first == again != other


def test_top_k_one_is_greedy(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = (run, "--prompt", "def ", "--max-new-tokens", 20)
    expected = text_of(capsys, *base, "--temperature", 0)
    assert text_of(capsys, *base, "--top-k", 1) == expected
    assert text_of(capsys, *base, "--top-p", 1e-9) == expected
    assert text_of(capsys, *base, "--temperature", 5) != expected


def test_a_prompt_file_is_one_prompt(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = "def größe(x):\r\n    return x\n"
    (tmp_path / "prompt.txt").write_bytes(content.encode())
    options = ("--temperature", 0, "--max-new-tokens", 5)
    found = text_of(capsys, run, "--prompt-file", tmp_path / "prompt.txt", *options)
    assert found == text_of(capsys, run, "--prompt", content, *options)


def test_what_is_said_beside_the_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--max-new-tokens", "32", "--checkpoint", "4"]) == 0
    err = capsys.readouterr().err
    assert re.fullmatch(r"step 4: \d+ tokens in [\d.]+ s, [\d,]+ tokens per second; [01] of 1 .*\n", err)
    assert main([str(run), "--max-new-tokens", "33"]) == 0
    assert "look back over 33 tokens; it was trained on 32 at a time" in capsys.readouterr().err


def test_a_skipped_checkpoint_is_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "checkpoints" / "step-00000006" / "index.json").unlink()
    assert main([str(copy), "--max-new-tokens", "1"]) == 0
    err = capsys.readouterr().err
    assert "skipped: checkpoint" in err and "step-00000006" in err and "step 4: " in err


def test_every_mistake_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin").write_bytes(b"gr\xf6\xdfe")
    bad = ["--temperature", "-1", "--top-k", "0", "--top-p", "2", "--max-new-tokens", "0"]
    files = ["--prompt-file", str(tmp_path / "absent"), "--prompt-file", str(tmp_path / "latin")]
    assert cli.main(["generate", str(tmp_path / "no-run"), "--prompt", "\udcff", *bad, *files]) == 2
    err = capsys.readouterr().err
    for option in ("--prompt '", "--temperature", "--top-k", "--top-p", "--max-new-tokens"):
        assert f"  - {option}" in err
    assert "absent cannot be read (No such file" in err and "latin is not UTF-8" in err


@pytest.mark.parametrize("word", ["--temperatur", "--max-new-tokens=x"])
def test_a_mistyped_option_is_refused(run: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(run), word, "1"])
    assert caught.value.code == 2


def test_an_interrupt_shows_what_there_is(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moesys.generation import decode

    def interrupted(model: object, prompts: list[list[int]], **options: object):
        yield 0, prompts[0][0]
        yield 1, prompts[1][0]
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "generate", interrupted)
    assert main([str(run), "--prompt", "x", "--prompt", "y"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "== 1 of 2 ==\nxx\n== 2 of 2 ==\nyy\n"
    assert "stopped by Ctrl-C" in captured.err


def start(run: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moesys", "generate", str(run), *arguments]
    # An empty PYTHONUNBUFFERED leaves stdout buffered whatever the surroundings say.
    environment = {**os.environ, "PYTHONUNBUFFERED": "", **environment}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment,
        # a shell's background job ignores Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.timeout(60)
def test_text_streams_and_a_reader_may_leave(run: Path) -> None:
    """Without a flush after each token the first read would bring a whole buffer of 8,192 bytes."""
    with start(run, "--prompt", "größe ", "--temperature", "0", "--max-new-tokens", "300000") as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            first = os.read(process.stdout.fileno(), 2**16)
            assert first.decode(errors="ignore").startswith("größe ") and len(first) < 4096
            process.stdout.close()
            err = process.stderr.read().decode()
            assert process.wait(30) == 1
        finally:
            process.kill()
    assert "Traceback" not in err and "BrokenPipe" not in err


@pytest.mark.timeout(60)
def test_ctrl_c_ends_the_line_and_the_process(run: Path) -> None:
    with start(run, "--prompt", "def ", "--temperature", "0", "--max-new-tokens", "300000") as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            process.stdout.read(20)
            process.send_signal(signal.SIGINT)
            out, err = process.stdout.read(), process.stderr.read().decode()
            assert process.wait(30) == 130
        finally:
            process.kill()
    assert out.endswith(b"\n") and "stopped by Ctrl-C" in err and "Traceback" not in err


@pytest.mark.timeout(60)
def test_a_terminal_without_utf8(run: Path) -> None:
    with start(run, "--prompt", "größe", "--max-new-tokens", "1", PYTHONIOENCODING="ascii") as process:
        out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    assert out.startswith(b"gr??e")
