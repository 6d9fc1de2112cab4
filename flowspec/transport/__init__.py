"""What carries everything between processes, over Redis streams.

``base`` says what a link and a control are; ``wire`` is the form of entries and keys,
``connections`` are clients of a server, ``control`` is what processes agree on, by Lua scripts,
``link`` moves messages and rows.
"""
