"""The HTTP gateway: a pipeline behind an OpenAI-compatible address. Imports no torch."""
