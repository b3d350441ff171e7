"""The `moesys` command: help, dispatch, and how errors are told."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import moesys
from moesys import cli, train_command
from moesys.config import RunConfig
from moesys.configuration import ConfigError, load_run_config, to_toml
from moesys.models.presets import PRESETS

ROOT = Path(moesys.__path__[0]).parent


def moesys_command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moesys", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, **options)  # type: ignore[call-overload]


def test_help_lists_the_commands() -> None:
    result = moesys_command("--help")
    assert result.returncode == 0
    for name, (_, line) in cli.COMMANDS.items():
        assert f"  {name} " in result.stdout and line in result.stdout


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0
    assert "commands:" in capsys.readouterr().out


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from moesys.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'tyro', 'numpy', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "print(heavy, file=sys.stderr); sys.exit(len(heavy))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_printing_a_configuration_does_without_pytorch() -> None:
    code = (
        "import sys; from moesys.cli import main\n"
        "main(['train', '--print-config']); sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_version_is_that_of_the_package() -> None:
    assert moesys_command("--version").stdout == f"moesys {moesys.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "moesys.__version__"}


def test_an_unknown_command_is_refused() -> None:
    result = moesys_command("trian")
    assert result.returncode == 2
    assert "'trian'" in result.stderr and "'train'" in result.stderr


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], int]], None]:
    """Puts a function in the place of `moesys eval`."""

    def put(main: Callable[[list[str]], int]) -> None:
        module = ModuleType("moesys_command_under_test")
        module.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "eval", (module.__name__, ""))

    return put


def raiser(error: BaseException) -> Callable[[list[str]], int]:
    def main(arguments: list[str]) -> int:
        raise error

    return main


def test_a_command_gets_its_arguments_and_gives_the_exit_status(command: Callable) -> None:
    seen: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        seen.append(arguments)
        return 7

    command(main)
    assert cli.main(["eval", "run", "--json", "x", "--help", "--debug"]) == 7
    assert cli.main(["--debug", "eval"]) == 7
    assert seen == [["run", "--json", "x", "--help", "--debug"], []]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("top_k is 9; set it to 4"), "top_k is 9; set it to 4"),
        (FileNotFoundError(2, "No such file or directory", "x"), "'x'"),
        (ConfigError(["a: b; c"]), "  - a: b; c"),
        (ValueError(), "ValueError()"),
    ],
)
def test_a_users_error_is_one_plain_message(
    command: Callable, capsys: pytest.CaptureFixture[str], error: Exception, told: str
) -> None:
    command(raiser(error))
    assert cli.main(["eval"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("moesys eval: ") and told in captured.err
    assert "Traceback" not in captured.err and captured.out == ""
    with pytest.raises(type(error)):
        cli.main(["--debug", "eval"])


def test_our_own_mistakes_keep_their_traceback(command: Callable) -> None:
    command(raiser(AssertionError("ours")))
    with pytest.raises(AssertionError):
        cli.main(["eval"])


def test_an_interrupt_ends_with_130(command: Callable) -> None:
    command(raiser(KeyboardInterrupt()))
    assert cli.main(["eval"]) == 130


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does once it has seen enough
    command = [sys.executable, "-m", "moesys", "train", "--list-presets"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # the write then fails at the flush
    result = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, env=buffered, timeout=60
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


class TestTrain:
    """`moesys train`, with the training itself replaced."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
        from moesys.training import run

        calls: list[tuple] = []
        monkeypatch.setattr(run, "train", lambda config: calls.append((config,)))
        monkeypatch.setattr(run, "resume", lambda folder, overrides: calls.append((folder, overrides)))
        return calls

    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        (tmp_path / "config.toml").write_text(to_toml(RunConfig()), encoding="utf-8")
        return tmp_path

    def test_alone_it_trains_the_default(self, calls: list[tuple]) -> None:
        assert cli.main(["train"]) == 0
        assert calls == [(RunConfig(),)]

    def test_file_and_options_may_stand_in_any_order(self, calls: list[tuple]) -> None:
        file = str(ROOT / "configs" / "tiny-mixtral.toml")
        options = ["--training.steps", "200", "--model.tie-embeddings"]
        for words in ([file, *options], [*options, file], [options[2], file, *options[:2]]):
            assert cli.main(["train", *words]) == 0
        assert calls == [(load_run_config(Path(file), options),)] * 3

    def test_resume_hands_over_folder_and_options(self, calls: list[tuple], saved: Path) -> None:
        assert cli.main(["train", "--training.steps=2000", f"--resume={saved}", "--training.seed", "3"]) == 0
        assert calls == [(saved, ["--training.steps=2000", "--training.seed", "3"])]

    def test_print_config_prints_toml_that_gives_the_same_run(
        self, calls: list[tuple], capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        words = ["--preset", "tiny-switch", "--training.steps", "150", "--optimizer.betas", "0.8", "0.99"]
        assert cli.main(["train", *words, "--print-config"]) == 0
        (tmp_path / "again.toml").write_text(capsys.readouterr().out, encoding="utf-8")
        assert load_run_config(tmp_path / "again.toml") == load_run_config(None, words)
        assert calls == []

    def test_print_config_of_a_resumed_run(
        self, calls: list[tuple], capsys: pytest.CaptureFixture[str], saved: Path
    ) -> None:
        assert cli.main(["train", "--resume", str(saved), "--print-config", "--training.steps", "2000"]) == 0
        assert tomllib.loads(capsys.readouterr().out)["training"]["steps"] == 2000
        assert calls == []

    def test_a_configuration_for_another_machine_can_be_printed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = str(ROOT / "configs" / "deepseek-v2-lite.toml")
        assert cli.main(["train", file, "--print-config"]) == 0
        assert cli.main(["train", file]) == 2  # it names a corpus that is not there

    def test_list_presets_names_them_all(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["train", "--list-presets"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1:-1]] == list(PRESETS)
        assert "671.0 B" in lines[1 + list(PRESETS).index("deepseek-v3")]

    @pytest.mark.parametrize(
        "words", [["--help"], ["-h"], ["--list-presets", "--help"], ["--training.steps", "-h"]]
    )
    def test_help_exits_after_printing(self, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            cli.main(["train", *words])
        assert caught.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        assert all(option in text for option in train_command.OWN_OPTIONS)
        assert "--training.steps" in text

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--resume"], ["--resume: a run folder is missing"]),
            (["a.toml", "b.toml"], ["a.toml b.toml: only one", "a.toml: there is no such file"]),
            (
                ["--resume", "none", "--lr", "1"],
                ["none/config.toml: there is no such run", "--lr: there is no such"],
            ),
            (
                ["--training.steps", "0", "--lr", "1"],
                ["training.steps = 0: must", "--lr: there is no such option"],
            ),
        ],
    )
    def test_mistakes_are_told_together(
        self, calls: list[tuple], capsys: pytest.CaptureFixture[str], words: list[str], told: list[str]
    ) -> None:
        assert cli.main(["train", *words]) == 2
        message = capsys.readouterr().err
        assert message.count("\n  - ") == len(told)
        assert all(f"\n  - {beginning}" in message for beginning in told)
        assert calls == []

    def test_a_file_beside_resume_is_refused(
        self, calls: list[tuple], capsys: pytest.CaptureFixture[str], saved: Path
    ) -> None:
        assert cli.main(["train", str(saved / "config.toml"), "--resume", str(saved)]) == 2
        assert "a resumed run has its own configuration" in capsys.readouterr().err
        assert calls == []
