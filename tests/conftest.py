"""For all tests: one thread each, since the tensors are tiny and more would only wait for each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for this process, before PyTorch is loaded, and those it starts
