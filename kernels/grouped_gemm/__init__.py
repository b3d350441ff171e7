"""Grouped GEMM: one matrix product per group of consecutive rows."""

from moesys.kernels.grouped_gemm.op import gmm, outer_product, pick_backend, product
from moesys.kernels.grouped_gemm.reference import gmm_reference

__all__ = ["gmm", "gmm_reference", "outer_product", "pick_backend", "product"]
