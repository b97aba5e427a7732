"""Pipelines: the executor of a plan's stages, the trace of its operations, and its checker."""
