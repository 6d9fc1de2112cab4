"""What a run is: its key, its job's spec, limits, sampling, history kept across jobs."""
