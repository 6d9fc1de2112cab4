"""One run at the draft worker; what a strategy is."""
