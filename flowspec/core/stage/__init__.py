"""The verify worker's machine."""
