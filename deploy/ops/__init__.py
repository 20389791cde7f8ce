"""Commands that ask a running region, and the tables of their answers."""
