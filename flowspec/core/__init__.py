"""The pure part: trees, acceptance, messages, the task graph and the machines.

Nothing here imports torch or Redis, reads a clock, the environment or a random source, or starts a
thread. A machine is ``step(input, now) -> outputs``; model results come in as plain data.
"""
