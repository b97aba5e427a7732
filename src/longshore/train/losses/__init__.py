"""Losses that are ready to use, by name: pure functions of tensors, without process groups."""
