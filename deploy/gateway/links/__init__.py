"""The gateway's view of clusters and of the links between them."""
