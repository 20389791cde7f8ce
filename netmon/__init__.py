"""What links between clusters can carry: TCP_INFO samples and link estimates. Knows no model."""
