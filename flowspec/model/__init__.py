"""Models: the toy needs no torch, all others are in modules that import it.

This file imports nothing, so that ``flowspec.model.toy`` and ``flowspec.model.directory`` can be
used without torch.
"""
