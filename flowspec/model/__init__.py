"""Models, in torch; this file imports nothing, so that some modules here do without it.

``weights``: what a folder holds; ``kernels``: products by precision; ``rows``: KV stores, masks and
attention; ``layers``: a block of the model; ``sampling``: from logits to tokens; ``drafters``.
"""
