"""region.yaml: its types, how it is read, and how it is checked."""
