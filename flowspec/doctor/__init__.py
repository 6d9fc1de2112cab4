"""What may keep a run from working on this machine, or make it slow, each with its remedy.

Every subject has a gatherer, which looks and waits for a bounded time, and checks, which are pure
functions of what was gathered.
"""
