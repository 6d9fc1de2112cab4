"""The draft worker's machine: which runs begin, share passes and end."""
