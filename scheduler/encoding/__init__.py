"""The encode stage: which instance encodes which media when, and whether that pays."""
