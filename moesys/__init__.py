"""Train Mixture-of-Experts language models, with numbers that do not depend on how the work is cut."""

__version__ = "0.1.0"
