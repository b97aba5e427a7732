"""Slow references of the ops, written to be read: one sequence at a time, plain autograd."""
