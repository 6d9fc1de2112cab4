"""What travels and what is agreed on: addresses, messages, work, task graph, ledger."""
