"""The strategy ``auto``: best-first growth, segment sizes by price, a bandit over drafters."""
