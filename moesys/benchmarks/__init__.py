"""`moesys bench NAME`: measurements that compare this project with another on the machine at hand."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

BENCHMARKS = {"step": ("moesys.benchmarks.step", "a whole training step, against transformers")}
"""Name to the module whose `main(arguments)` runs it (imported only when asked for) and what it measures."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that `arguments[0]` names with the rest of the arguments; returns an exit status.

    With no name, or with --help, lists the benchmarks.
    Raises ValueError for a name that is not there.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: moesys bench NAME [OPTIONS]   (moesys bench NAME --help lists the options)\n")
        print("\n".join(f"  {name:<10}{about}" for name, (_, about) in BENCHMARKS.items()))
        return 0
    name, *rest = arguments
    if name not in BENCHMARKS:
        raise ValueError(f"no benchmark is called {name!r}; there are: {', '.join(BENCHMARKS)}")
    return import_module(BENCHMARKS[name][0]).main(rest)
