"""Longshore: packed training with dynamic context parallelism."""
