"""Measures a machine for planner, simulator and advice: see calibrate/measure.py."""
