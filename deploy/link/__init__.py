"""`prfaas link`: what the links between clusters carry, as people see it."""
