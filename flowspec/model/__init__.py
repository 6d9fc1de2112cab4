"""Models, in torch; this file imports nothing, so that some modules here do without it."""
