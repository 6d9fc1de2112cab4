"""Rehearsing a cluster on one machine: profiles of devices and links, simulation, comparison,
tables.
"""
