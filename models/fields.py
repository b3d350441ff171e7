"""What a configuration field accepts, read from its annotation, and a list that collects what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

_NOUNS = {int: "an integer", float: "a number", str: "text in quotes", bool: "true or false"}


def field_types(config_class: type) -> dict[str, Any]:
    """Name to annotation of every field of a configuration dataclass, in order."""
    hints = get_type_hints(config_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


def describe(kind: Any) -> str:
    """What a field of this annotation takes, in words: `describe(tuple[float, float]) == "2 numbers"`."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of numbers" if get_args(kind)[-1] is Ellipsis else f"{len(get_args(kind))} numbers"
    return _NOUNS[kind]


def coerce(value: Any, kind: Any) -> Any:
    """The value as a field of this annotation holds it: an integer fits a number, a list fits a tuple.

    Raises TypeError for anything else. A boolean is no number, a number is no text.
    """
    if get_origin(kind) is Literal:
        fits = isinstance(value, str) and value in get_args(kind)
    elif get_origin(kind) is tuple:
        items = get_args(kind)
        fits = isinstance(value, list | tuple) and (items[-1] is Ellipsis or len(value) == len(items))
        if fits:
            return tuple(coerce(item, items[0]) for item in value)
    elif kind is float and type(value) is int and abs(value) < 2**1000:
        return float(value)
    else:
        fits = type(value) is kind
    if not fits:
        raise TypeError(f"must be {describe(kind)}, not {show(value)}")
    return value


def show(value: Any) -> str:
    """A value as the configuration file writes it."""
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    return "a table" if isinstance(value, dict) else str(value)


class Findings:
    """Collects the rules that a configuration breaks, so that all of them are told at once."""

    def __init__(self, config: Any, prefix: str = "") -> None:
        """Fields are looked up in config by dotted name; prefix is put before each name in the messages."""
        self.config, self.prefix = config, prefix
        self.found: list[tuple[tuple[str, ...], str]] = []

    def require(self, holds: bool, names: str, rule: str, mend: str) -> bool:
        """Note the rule as broken unless it holds; names are its fields, separated by spaces.

        The message reads `field = value, ...: rule; mend`. Returns holds, for rules that build on it.
        """
        if not holds:
            fields = tuple(self.prefix + name for name in names.split())
            values = (show(self.value(name)) for name in names.split())
            given = ", ".join(f"{field} = {value}" for field, value in zip(fields, values, strict=True))
            self.found.append((fields, f"{given}: {rule}; {mend}"))
        return holds

    def at_least(self, minimum: int, names: str) -> bool:
        """Each of the named numbers is at least minimum."""
        rule, mend = f"must be at least {minimum}", f"set it to {minimum} or more"
        return all([self.require(self.value(name) >= minimum, name, rule, mend) for name in names.split()])

    def not_negative(self, names: str) -> bool:
        """Each of the named numbers is 0 or more."""
        mend = "set it to 0 or more"
        return all(
            [
                self.require(self.value(name) >= 0, name, "must not be negative", mend)
                for name in names.split()
            ]
        )

    def above_zero(self, names: str) -> bool:
        """Each of the named numbers is above 0."""
        mend = "give a positive number"
        return all(
            [self.require(self.value(name) > 0, name, "must be above 0", mend) for name in names.split()]
        )

    def within(self, low: float, high: float, names: str) -> bool:
        """Each of the named numbers lies in [low, high]."""
        rule, mend = f"must lie between {low:g} and {high:g}", "give a number in that range"
        return all(
            [self.require(low <= self.value(name) <= high, name, rule, mend) for name in names.split()]
        )

    def well_typed(self) -> bool:
        """Every field of config itself holds what its annotation says, and no infinity or NaN."""
        return all([self._well_typed(name, kind) for name, kind in field_types(type(self.config)).items()])

    def value(self, name: str) -> Any:
        """The value of a field by dotted name."""
        value = self.config
        for part in name.split("."):
            value = getattr(value, part)
        return value

    @property
    def problems(self) -> list[str]:
        """The messages, in the order found."""
        return [text for _, text in self.found]

    def _well_typed(self, name: str, kind: Any) -> bool:
        if dataclasses.is_dataclass(kind):
            return True
        value = self.value(name)
        try:
            held = coerce(value, kind)
        except TypeError as error:
            return self.require(False, name, str(error).split(", not ")[0], "give a value of that kind")
        numbers = held if isinstance(held, tuple) else (held,)
        finite = all(math.isfinite(number) for number in numbers if isinstance(number, float))
        return self.require(finite, name, "must be finite", "give a finite number")
