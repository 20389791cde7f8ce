"""`prfaas plan profile`: measures an engine."""
