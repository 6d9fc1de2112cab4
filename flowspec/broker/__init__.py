"""The transport of messages: codec, key names, Lua scripts, Redis and its in-memory twin."""
