"""Models behind the machines: the toy one needs no torch, all others live in modules that import
it.

This file stays empty of imports, so that ``flowspec.model.toy`` and ``flowspec.model.directory``
can be used without torch.
"""
