"""The processes, such as ``python -m workers.draft``; ``probe`` measures a machine for a plan."""
