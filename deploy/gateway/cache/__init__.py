"""The gateway looks up, shows and moves what the region has cached."""
