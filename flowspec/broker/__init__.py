"""Everything that knows how messages travel: codec, key names, Lua scripts, Redis and its in-memory
twin.
"""
