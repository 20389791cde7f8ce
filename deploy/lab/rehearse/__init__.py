"""A plan played on real engines at the pace of its profiles, beside plan and simulation."""
