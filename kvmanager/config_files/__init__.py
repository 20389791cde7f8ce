"""Files that people write in YAML: how they are read, how quantities are spelled, what errors say.

All processes read their files through this package, so that a mistake in any of them is shown with
its line, its path and what to write instead.
"""
