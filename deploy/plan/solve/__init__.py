"""`prfaas plan solve`: from plan.yaml to a plan, its tables and pictures."""
