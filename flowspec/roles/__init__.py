"""What a process of a pipeline is: its loop, its lease, its performers, the scheduler."""
