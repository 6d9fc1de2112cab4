"""Strategy ``auto``: best-first growth, segment sizing, drafter bandit, cost history."""
