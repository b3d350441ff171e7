"""Command-line options `--section.field VALUE`: sorted into groups, and applied to a configuration by tyro.

tyro alone reads the values; what stands here finds every option that it refuses, to tell them all at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_origin

from moesys.config import RunConfig
from moesys.models.fields import describe, field_types, show

HELP = ("-h", "--help")


@dataclasses.dataclass
class Faults:
    """What was found wrong so far."""

    problems: list[str] = dataclasses.field(default_factory=list)
    fields: set[str] = dataclasses.field(default_factory=set)
    """Fields that do not hold what the user wrote, since that was wrong: no rule is judged on them."""

    def add(self, problem: str, field: str | None = None) -> None:
        """Note a problem, and the field whose value it spoils. A wrong preset spoils the whole model."""
        self.problems.append(problem)
        if field == "preset":
            self.fields.update(name for name in known_fields() if name.startswith("model."))
        if field is not None:
            self.fields.add(field)


@cache
def known_fields() -> Mapping[str, Any]:
    """Dotted name to annotation of every field of a run's configuration, in order."""
    fields: dict[str, Any] = {}
    for name, kind in field_types(RunConfig).items():
        if dataclasses.is_dataclass(kind):
            fields.update({f"{name}.{key}": inner for key, inner in field_types(kind).items()})  # type: ignore[arg-type]
        else:
            fields[name] = kind
    return fields


@cache
def known_options() -> Mapping[str, str]:
    """Option to field, for every option that tyro makes of the fields, `--section.no-field` included."""
    options = {}
    for name, kind in known_fields().items():
        section, dot, key = name.rpartition(".")
        options[f"--{name}".replace("_", "-")] = name
        if kind is bool:
            options[f"--{section}{dot}no-{key}".replace("_", "-")] = name
    return options


def option_of(group: Sequence[str]) -> str:
    """The option that a group of words starts with, as `known_options` spells it."""
    return group[0].partition("=")[0].replace("_", "-")


def values_of(group: Sequence[str]) -> list[str]:
    """The values in a group of words: `["--a", "1"]` and `["--a=1"]` both hold `["1"]`."""
    _, equals, value = group[0].partition("=")
    return [value, *group[1:]] if equals else list(group[1:])


def split_arguments(
    arguments: Sequence[str], extra: dict[str, int] | None = None
) -> tuple[list[list[str]], list[str]]:
    """The words of a command line as options with their values, and the words that belong to none.

    `split_arguments(["x.toml", "--training.steps", "5"]) == ([["--training.steps", "5"]], ["x.toml"])`.
    extra names further options and how many values each takes. An unknown option is taken to have one.
    """
    options, types, extra = known_options(), known_fields(), extra or {}
    groups: list[list[str]] = []
    loose: list[str] = []
    room = 0.0
    for word in arguments:
        if word.startswith("--") and word != "--":
            groups.append([word])
            option = option_of(groups[-1])
            room = extra[option] if option in extra else _num_values(types.get(options.get(option, ""), str))
            room -= "=" in word
        elif room > 0:
            groups[-1].append(word)
            room -= 1
        else:
            loose.append(word)
    return groups, loose


def read_options(arguments: Sequence[str], faults: Faults) -> list[list[str]]:
    """The options among the arguments that exist, each with its values; the other words become faults."""
    options = known_options()
    groups, loose = split_arguments([word for word in arguments if word not in HELP])
    for word in loose:
        faults.add(
            f"{word}: this belongs to no option; write --section.field VALUE, and --section.switch alone"
        )
    for group in groups:
        if option_of(group) not in options:
            # others write --no-section.field
            spelled = option_of(group).replace("--no-", "--", 1).replace(".", ".no-", 1)
            hint = spelled if spelled in options else nearest_field(option_of(group), options)
            mend = f"did you mean {hint}?" if hint else "--help lists them all"
            faults.add(f"{group[0].partition('=')[0]}: there is no such option; {mend}")
    return [group for group in groups if option_of(group) in options]


def apply_options(config: RunConfig, groups: Sequence[Sequence[str]], faults: Faults) -> RunConfig:
    """The configuration with the options' values; a value that does not fit its option becomes a fault."""
    whole = parse(config, [word for group in groups for word in group])
    if whole is not None:
        return whole
    for group in groups:  # one at a time, to find those that tyro refuses
        one = parse(config, group)
        if one is None:
            name = known_options()[option_of(group)]
            values = values_of(group)
            given = " ".join([group[0].partition("=")[0], *values])
            faults.add(f"{given}: {_refusal(name, option_of(group), values, config)}", name)
        config = config if one is None else one
    return config


def parse(config: RunConfig, words: Sequence[str]) -> RunConfig | None:
    """The configuration with what tyro reads from the words, or None if it refuses them."""
    import tyro  # a tenth of a second that `moesys --help` need not spend

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # console_outputs alone leaves some errors printed
            return tyro.cli(RunConfig, args=list(words), default=config, console_outputs=False)
    except SystemExit:
        return None


def print_help(config: RunConfig, prog: str | None, description: str | None) -> None:
    """Print every option with its value in config, section by section, and exit."""
    import tyro

    tyro.cli(RunConfig, args=["--help"], default=config, prog=prog, description=description)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs from a mistyped one by a few letters, if any."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def nearest_field(name: str, known: Iterable[str]) -> str | None:
    """The dotted name meant by a mistyped one: the same key in another section, or a few letters apart."""
    section, _, key = name.rpartition(".")
    keys = {full: full.rpartition(".")[2].lstrip("-") for full in known}
    siblings = [keys[full] for full in keys if full.rpartition(".")[0] == section]
    key = key.lstrip("-")
    meant = key if key in keys.values() else nearest(key, siblings) or nearest(key, keys.values())
    return next((full for full in keys if keys[full] == meant), None)


def example(name: str, kind: Any, value: Any, config: RunConfig) -> str:
    """How to mend a field of the wrong kind: the choice that was meant, or a value that would fit."""
    if get_args(kind) and get_origin(kind) is not tuple:
        hint = nearest(str(value), get_args(kind))
        return f"did you mean {show(hint)}?" if hint else "choose one of them"
    section, _, key = name.rpartition(".")
    return f"write for instance {key} = {show(getattr(getattr(config, section) if section else config, key))}"


def _num_values(kind: Any) -> float:
    if get_origin(kind) is tuple:
        return float("inf") if Ellipsis in get_args(kind) else len(get_args(kind))
    return 0 if kind is bool else 1


def _refusal(name: str, option: str, values: list[str], config: RunConfig) -> str:
    kind = known_fields()[name]
    if kind is bool:
        pair = [known for known, field in known_options().items() if field == name]
        return f"this switch takes no value; write {pair[0]} or {pair[1]}"
    if not values:
        return f"a value is missing, {describe(kind)}; {_on_command_line(name, option, kind, config)}"
    if kind is str:
        return f"a value that starts with a dash needs an equals sign; write {option}={values[0]}"
    if get_args(kind) and get_origin(kind) is not tuple:
        return f"must be {describe(kind)}; {example(name, kind, values[0], config)}"
    return f"must be {describe(kind)}; {_on_command_line(name, option, kind, config)}"


def _on_command_line(name: str, option: str, kind: Any, config: RunConfig) -> str:
    section, _, key = name.rpartition(".")
    value = getattr(getattr(config, section) if section else config, key)
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value) or "TEXT"
    return f"write for instance {option} {text}"
