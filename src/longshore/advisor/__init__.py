"""Measures a machine for planner, simulator and advice: see advisor/calibrate.py."""
