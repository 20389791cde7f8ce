"""The global directory: which node of the region holds which prefixes, in which tier."""
