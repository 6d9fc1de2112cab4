"""Rows that are kept of ended jobs, and which of them a prompt begins with."""
