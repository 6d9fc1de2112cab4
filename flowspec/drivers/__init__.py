"""The only loops: they feed machines and perform what these ask for, live, simulated
or replayed.
"""
