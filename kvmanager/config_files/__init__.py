"""Reads the YAML files that people write, with quantities in units and helpful errors.

All processes read their files through this package, so that every mistake is shown with its line,
its path and what to write instead.
"""
