"""Child processes: started, watched, restarted with backoff, stopped with all that they started."""
