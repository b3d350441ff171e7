"""Open run folders: what a report needs of them, and errors that help to find the right one."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesys.report.metrics import Metrics, read_metrics

CONTENTS = (
    "A run folder is what `moesys train` writes: config.toml, metrics.jsonl, tokenizer.json, "
    "environment.json, checkpoints/, and summary.json once the run has ended."
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run as its folder tells it."""

    name: str
    """Folder name, with as many parents as tell it from the other runs shown with it."""
    folder: Path
    config: dict[str, Any]
    """config.toml as nested dictionaries."""
    metrics: Metrics
    summary: dict[str, Any]
    """summary.json; empty while the run has not ended, or has gone on since it was written."""
    environment: dict[str, Any]
    """environment.json; empty if there is none."""

    @property
    def ended(self) -> bool:
        """Whether the run has written its summary."""
        return bool(self.summary)

    def setting(self, key: str, default: Any = None) -> Any:
        """A configuration value by its dotted name, such as "model.num_experts"."""
        return flatten(self.config).get(key, default)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read each folder, and name the runs so that no two names are equal.

    Raises ValueError for no folder, a folder given twice, and whatever a folder holds that cannot be read;
    FileNotFoundError for a folder that is no run.
    """
    if not folders:
        raise ValueError("no run was given; name at least one run folder, such as runs/tiny-deepseek-001")
    resolved = [folder.resolve() for folder in folders]
    for folder in folders:
        if resolved.count(folder.resolve()) > 1:
            raise ValueError(f"{folder} was given twice; name each run once")
    return [_read_run(folder, name) for folder, name in zip(folders, _distinct_names(resolved), strict=True)]


def _read_run(folder: Path, name: str) -> Run:
    missing = [file for file in ("config.toml", "metrics.jsonl") if not (folder / file).is_file()]
    if missing:
        raise FileNotFoundError(_no_run(folder, missing))
    metrics = read_metrics(folder / "metrics.jsonl")
    summary = _read_json(folder / "summary.json")
    if summary.get("steps", metrics.steps[-1]) < metrics.steps[-1]:
        summary = {}  # resumed with more steps: the old ending says nothing about the new one
    return Run(
        name=name,
        folder=folder,
        config=_read_toml(folder / "config.toml"),
        metrics=metrics,
        summary=summary,
        environment=_read_json(folder / "environment.json"),
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML ({error}); mend it, `moesys train` wrote it whole") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file, or {} if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); mend it, or remove it to go without") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object; mend it, or remove it to go without")
    return value


def _no_run(folder: Path, missing: list[str]) -> str:
    what = f"has no {' and no '.join(missing)}" if folder.is_dir() else "is not a folder"
    if not folder.exists():
        what = "does not exist"
    nearest = nearest_runs(folder)
    found = f" Runs found near it: {', '.join(map(str, nearest))}." if nearest else ""
    return f"{folder} is no run folder: it {what}. {CONTENTS}{found}"


def nearest_runs(folder: Path, limit: int = 5) -> list[Path]:
    """Run folders around a path that is none: inside it, above it and beside it, most similar name first."""
    children = list(_run_folders(folder))
    above = [parent for parent in folder.absolute().parents[:2] if _looks_like_run(parent)]
    beside = sorted(
        _run_folders(folder.parent),
        key=lambda path: -difflib.SequenceMatcher(None, path.name, folder.name).ratio(),
    )
    return list(dict.fromkeys([*children, *above, *beside]))[:limit]


def _run_folders(folder: Path) -> Iterator[Path]:
    """Runs directly inside a folder, and inside its folder runs/."""
    for parent in (folder, folder / "runs"):
        try:
            yield from sorted(path for path in parent.iterdir() if _looks_like_run(path))
        except OSError:
            continue


def _looks_like_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file() and (folder / "metrics.jsonl").is_file()


def _distinct_names(folders: Sequence[Path]) -> list[str]:
    """The shortest path endings that tell the folders apart."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("resolved folders are distinct")


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differing_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Configuration keys whose values are not the same in all runs, each with one value a run.

    None stands for a key that a run's configuration lacks. Where the results go is left out.
    """
    configs = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key != "run_dir")
    values = {key: [config.get(key) for config in configs] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}
