"""Operators on packed sequences; `reference` has those that mix tokens again, slow and obvious."""
