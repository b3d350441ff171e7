"""Train, benchmark and retrofit Mixture-of-Experts language models, with the same numbers on every layout."""

__version__ = "0.1.0"
