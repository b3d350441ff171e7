"""docs/configuration.md agrees with the code: every preset, every field, the example of an error."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path

import pytest

import moesys
from moesys import cli
from moesys.config import RunConfig
from moesys.models.count import count_parameters
from moesys.models.fields import field_types, show
from moesys.models.presets import PRESETS
from moesys.train_command import short

ROOT = Path(moesys.__path__[0]).parent
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def preset_rows() -> Iterator[str]:
    for name, preset in PRESETS.items():
        count = count_parameters(preset())
        text = (preset.__doc__ or "").rstrip(".")
        yield f"| `{name}` | {short(count.total)} | {short(count.active)} | {text} |"


def docstrings() -> dict[tuple[str, str], str]:
    """(class, field) to the text under the field, from the source files."""
    found = {}
    for file in ("moesys/config.py", "models/config.py"):
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                for field, text in zip(node.body, node.body[1:], strict=False):
                    if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                        name, value = ast.unparse(field.target), ast.literal_eval(text.value)
                        found[node.name, name] = " ".join(value.split())
    return found


def field_rows() -> Iterator[str]:
    texts, default = docstrings(), RunConfig()
    for section, kind in field_types(RunConfig).items():
        inner = field_types(kind) if is_dataclass(kind) else {section: kind}  # type: ignore[arg-type]
        for name in inner:
            part = getattr(default, section) if is_dataclass(kind) else default
            path = f"{section}.{name}" if is_dataclass(kind) else name
            text = texts[type(part).__name__, name].replace("|", "\\|")
            yield f"| `{path}` | `{show(getattr(part, name))}` | {text} |"


@pytest.mark.parametrize("rows", [preset_rows, field_rows], ids=["presets", "fields"])
def test_every_row_stands_in_the_page(rows: Callable[[], Iterator[str]]) -> None:
    table = list(rows())
    missing = [row for row in table if row not in PAGE]
    assert not missing, "docs/configuration.md lacks these rows:\n" + "\n".join(missing)


def test_the_page_has_no_rows_of_the_past() -> None:
    known = {*preset_rows(), *field_rows()}
    assert [line for line in PAGE.splitlines() if line.startswith("| `") and line not in known] == []


def test_the_example_of_an_error_is_real(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, rest = PAGE.partition("```toml\n# mistakes.toml\n")
    toml, _, rest = rest.partition("```\n")
    (tmp_path / "mistakes.toml").write_text(toml, encoding="utf-8")
    _, _, rest = rest.partition("```console\n$ moesys ")
    command, _, rest = rest.partition("\n")
    assert cli.main(shlex.split(command)) == 2
    assert capsys.readouterr().err == rest.partition("```")[0]
