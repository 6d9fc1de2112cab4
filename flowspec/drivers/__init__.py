"""The only loops: they feed machines and perform their outputs, live, simulated or replayed."""
