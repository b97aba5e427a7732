"""Ranks, their process groups, and what they send each other."""
