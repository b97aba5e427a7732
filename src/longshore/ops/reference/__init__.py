"""Twins of the operators, written to be read: one sequence at a time, plain autograd."""
