"""The token tree: status of every node, acceptance, segments, which rows live."""
