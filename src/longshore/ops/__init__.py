"""Operators on packed sequences; `reference` has the same names, slow and obvious."""
