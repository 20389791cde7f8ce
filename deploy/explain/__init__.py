"""`prfaas explain`: why one request went where it did."""
