"""The processes: ``python -m workers.scheduler``, ``workers.draft``, ``workers.verify
--stage N``.
"""
