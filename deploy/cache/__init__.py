"""`prfaas cache`: what a region has cached, as its gateway knows it."""
