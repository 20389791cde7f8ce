"""No integration test may see an event loop of ours stand still; see `no_gaps`."""

from no_gaps import gaps_of_children, no_gaps_in_children, pytest_runtest_call

__all__ = ["gaps_of_children", "no_gaps_in_children", "pytest_runtest_call"]
