"""A pipeline that is broken at random moments: ``python -m ops.chaos``."""
