"""Kernels in Triton, one module for each op of ops/; ops/backends.py says when they run."""
