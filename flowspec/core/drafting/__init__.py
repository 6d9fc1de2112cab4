"""Growths of the tree, a drafter's KV cache, calibration of its values."""
