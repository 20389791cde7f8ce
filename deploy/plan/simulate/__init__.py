"""A region in virtual time: what the scheduler's decisions are worth before they run."""
