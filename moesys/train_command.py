"""`moesys train`: read the command line, then train, go on with a run, or print a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moesys.configuration import ConfigError, load_run_config, load_saved, to_toml
from moesys.models.count import count_parameters
from moesys.models.presets import PRESETS
from moesys.overrides import HELP, option_of, split_arguments, values_of

OWN_OPTIONS = {"--resume": 1, "--print-config": 0, "--list-presets": 0}
"""Options of this command beside those of the configuration, and how many values each takes."""

USAGE = "moesys train [CONFIG.toml] [--preset NAME] [--resume RUN] [--print-config] [--list-presets]"
DESCRIPTION = """Train a model: the preset's configuration, changed by CONFIG.toml, changed by the options below.
--resume RUN goes on with the run in the folder RUN, with its configuration instead of a preset's.
--print-config prints the resolved configuration as TOML and stops; as CONFIG.toml it gives the same run.
--list-presets prints the presets with their sizes and stops."""


def main(arguments: Sequence[str]) -> int:
    """Run `moesys train` with these arguments; returns the exit status."""
    asks_help = any(word in HELP for word in arguments)
    groups, files = split_arguments([word for word in arguments if word not in HELP], OWN_OPTIONS)
    own = {option_of(group): values_of(group) for group in groups if option_of(group) in OWN_OPTIONS}
    overrides = [word for group in groups if option_of(group) not in OWN_OPTIONS for word in group]
    if "--list-presets" in own and not asks_help:
        print(preset_table())
        return 0
    config_file, run_dir, problems = _what_to_run(own, files)
    only_print = "--print-config" in own
    try:
        if asks_help:
            load_run_config(config_file, [*overrides, "--help"], prog=USAGE, description=DESCRIPTION)
        if run_dir is None:
            config = load_run_config(config_file, overrides, check_machine=not only_print)
        else:
            config = load_saved(run_dir, overrides, check_machine=not only_print)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    if only_print:
        print(to_toml(config), end="")
        return 0
    from moesys.training import run  # PyTorch is loaded from here on

    if run_dir is None:
        run.train(config)
    else:
        run.resume(run_dir, overrides)
    return 0


def preset_table() -> str:
    """The presets, a line each: name, total and active parameters, what it is."""
    rows = [("preset", "parameters", "active", "")]
    for name, preset in PRESETS.items():
        count = count_parameters(preset())
        rows.append((name, short(count.total), short(count.active), (preset.__doc__ or "").rstrip(".")))
    rows.append(("", "", "", "(active counts the input embedding; DeepSeek's own figures do not)"))
    return "\n".join(
        f"{name:<18}{total:>11}{active:>9}  {text}".rstrip() for name, total, active, text in rows
    )


def _what_to_run(own: dict[str, list[str]], files: list[str]) -> tuple[Path | None, Path | None, list[str]]:
    """The configuration file, the run to resume, and what is wrong with naming them."""
    problems = []
    if len(files) > 1:
        problems.append(f"{' '.join(files)}: only one configuration file can be read; name one")
    run_dir = None
    if "--resume" in own:
        if not own["--resume"]:
            problems.append("--resume: a run folder is missing; write --resume RUN")
        elif files:
            problems.append(
                f"{files[0]}: a resumed run has its own configuration; leave out the file, or --resume"
            )
        else:
            run_dir = Path(own["--resume"][0])
    return (Path(files[0]) if files else None), run_dir, problems


def short(count: int) -> str:
    """A number of parameters as people say it: `short(15_706_484_224) == "15.7 B"`."""
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
