"""What the region knows of itself while it runs, and what follows from it."""
