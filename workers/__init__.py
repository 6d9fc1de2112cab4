"""The processes: ``python -m workers.scheduler``, ``.draft``, ``.verify`` and ``.middle``."""
