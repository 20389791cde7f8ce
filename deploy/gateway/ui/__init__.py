"""The page under /ui: its files, and the values that it follows."""
