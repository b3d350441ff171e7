"""From a preset, a TOML file and command-line options to the configuration of a run, and back to TOML.

    config = load_run_config(Path("configs/tiny-mixtral.toml"), ["--training.steps", "200"])

A value on the command line goes before one in the file, and that before the preset's. Whatever is wrong in
the file, on the command line or between the values is told in one `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesys.config import RunConfig
from moesys.models.fields import coerce, field_types, show
from moesys.models.presets import PRESETS
from moesys.overrides import (
    HELP,
    Faults,
    apply_options,
    example,
    known_fields,
    nearest,
    nearest_field,
    option_of,
    print_help,
    read_options,
    values_of,
)
from moesys.validation import machine_findings, run_findings

CHECKPOINTED = ("preset", "run_dir", "model.", "data.tokenizer")
"""Fields, or beginnings of fields, that checkpoints depend on: a resumed run keeps them."""


class ConfigError(ValueError):
    """A configuration that cannot run. `problems` has one message per fault; the text lists them all."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  - ".join([f"The configuration has {count}:", *self.problems]))


def load_run_config(
    path: Path | None,
    arguments: Sequence[str] = (),
    *,
    check_machine: bool = True,
    prog: str | None = None,
    description: str | None = None,
) -> RunConfig:
    """The configuration that a preset, a TOML file and command-line options give, in rising precedence.

    arguments are options such as `["--preset", "tiny-mixtral", "--model.num-experts", "32"]`; `--help` among
    them prints every option with its value so far, under prog and description, and exits. check_machine asks
    whether the files, packages and devices named exist here. Raises ConfigError with every problem at once.
    """
    faults = Faults()
    table = {} if path is None else _read_toml(path, faults)
    options = read_options(arguments, faults)
    preset = _option_value(options, "--preset")
    start = _from_preset(table.get("preset", RunConfig().preset) if preset is None else preset, faults)
    config = _apply_table(start, table, path, faults)
    if set(arguments) & set(HELP):
        print_help(config, prog, description)
    _check_effect(preset, table, path, faults)
    return _finish(apply_options(config, options, faults), faults, check_machine)


def load_saved(path: Path, arguments: Sequence[str] = (), *, check_machine: bool = False) -> RunConfig:
    """The configuration that a run folder holds, with options that change it for going on.

    path is the folder or the config.toml in it. What its checkpoints depend on (CHECKPOINTED) must stay.
    Raises ConfigError with every problem at once.
    """
    faults = Faults()
    file = path if path.is_file() else path / "config.toml"
    table = _read_toml(file, faults, absent="there is no such run; name the folder of one")
    saved = _apply_table(_from_preset(table.get("preset", RunConfig().preset), faults), table, file, faults)
    unread = frozenset(faults.fields)
    config = apply_options(saved, read_options(arguments, faults), faults)
    for name in known_fields():
        kept, wanted = _value(saved, name), _value(config, name)
        if name.startswith(CHECKPOINTED) and kept != wanted and name not in unread:
            faults.add(
                f"{name} = {show(wanted)}: a resumed run keeps what its checkpoints depend on, "
                f"here {show(kept)}; leave it out, or start a new run",
                name,
            )
    return _finish(
        config, faults, check_machine, at_hand=frozenset({"data.tokenizer"})
    )  # it is in the folder


def to_toml(config: RunConfig) -> str:
    """The whole configuration as a TOML document, from which `load_run_config` gives back an equal one."""
    import tomli_w  # only writing needs it

    return tomli_w.dumps(dataclasses.asdict(config))


def _read_toml(
    path: Path,
    faults: Faults,
    absent: str = "there is no such file; name one that exists, or leave it out to start from a preset",
) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except IsADirectoryError:
        fault = "this is a folder; name a TOML file, or resume a run with --resume"
    except FileNotFoundError:
        fault = absent
    except OSError as error:
        fault = f"the file cannot be read ({error.strerror}); check its permissions"
    except ValueError as error:  # not UTF-8, or not TOML
        fault = (
            f"this is not TOML: {error}; mend it there (text stands in quotes, true and false are lower case)"
        )
    faults.add(f"{path}: {fault}")
    faults.fields.update(known_fields())
    return {}


def _from_preset(preset: Any, faults: Faults) -> RunConfig:
    if isinstance(preset, str) and preset in PRESETS:
        return RunConfig(preset=preset, model=PRESETS[preset]())
    if isinstance(preset, str):
        hint = nearest(preset, PRESETS)
        mend = f"did you mean {show(hint)}?" if hint else f"choose one of {', '.join(PRESETS)}"
        faults.add(f"preset = {show(preset)}: there is no such preset; {mend}", "preset")
    return RunConfig()


def _apply_table(config: RunConfig, table: dict[str, Any], path: Path | None, faults: Faults) -> RunConfig:
    changes: dict[str, Any] = {}
    sections = {name: kind for name, kind in field_types(RunConfig).items() if dataclasses.is_dataclass(kind)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key in sections and isinstance(value, dict):
            values.update({f"{key}.{name}": item for name, item in value.items()})
        elif key in sections:
            faults.add(f"{key} = {show(value)} ({path}): this is a table; write [{key}] and its fields below")
        elif isinstance(value, dict):
            hint = nearest(key, sections)
            mend = f"did you mean [{hint}]?" if hint else f"the tables are {', '.join(sections)}"
            faults.add(f"[{key}] ({path}): there is no such table; {mend}")
        else:
            values[key] = value
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        if name not in known_fields():
            faults.add(f"{name} ({path}): there is no such field; {_field_hint(name, section)}")
            continue
        kind = known_fields()[name]
        try:
            changes.setdefault(section, {})[key] = coerce(value, kind)
        except TypeError as error:
            rule = str(error).removesuffix(f", not {show(value)}")
            mend = example(name, kind, value, config)
            faults.add(f"{name} = {show(value)} ({path}): {rule}; {mend}", name)
    top = changes.pop("", {})
    parts = {name: dataclasses.replace(getattr(config, name), **inner) for name, inner in changes.items()}
    return dataclasses.replace(config, **top, **parts)


def _field_hint(name: str, section: str) -> str:
    hint = nearest_field(name, known_fields())
    if hint:
        return f"did you mean {hint}?"
    siblings = [field.rpartition(".")[2] for field in known_fields() if field.rpartition(".")[0] == section]
    return f"there are {', '.join(siblings)}"


def _option_value(options: Sequence[Sequence[str]], option: str) -> str | None:
    values = [value for group in options if option_of(group) == option for value in values_of(group)]
    return values[-1] if values else None


def _value(config: RunConfig, name: str) -> Any:
    section, _, key = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, key)


def _check_effect(preset: str | None, table: dict[str, Any], path: Path | None, faults: Faults) -> None:
    every_field = {name.removeprefix("model.") for name in known_fields() if name.startswith("model.")}
    if preset not in (None, table.get("preset")) and set(table.get("model", ())) >= every_field:
        faults.add(
            f"preset = {show(preset)}: {path} sets every field of [model], so another preset has no effect; "
            "remove its [model] table, or this option"
        )


def _finish(
    config: RunConfig, faults: Faults, check_machine: bool, at_hand: frozenset[str] = frozenset()
) -> RunConfig:
    found = run_findings(config).found
    if check_machine:
        found += [finding for finding in machine_findings(config).found if not at_hand & set(finding[0])]
    faults.problems += [text for names, text in found if not faults.fields & set(names)]
    if faults.problems:
        raise ConfigError(faults.problems)
    return config
