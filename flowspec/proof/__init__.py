"""The proof of a pair on the user's own machine: that a pipeline of it loses nothing."""
