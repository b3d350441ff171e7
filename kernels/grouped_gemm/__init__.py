"""Grouped GEMM: one matrix product per group of consecutive rows."""

from moesys.kernels.grouped_gemm.op import gmm, pick_backend
from moesys.kernels.grouped_gemm.reference import gmm_reference

__all__ = ["gmm", "gmm_reference", "pick_backend"]
