"""`prfaas role`: which instances prefill and which decode, and changing it."""
