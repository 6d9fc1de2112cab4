"""Rehearsal of a cluster on one machine: simulation, emulation, replay, measuring."""
