"""Costs, measured as ratios within one run."""
