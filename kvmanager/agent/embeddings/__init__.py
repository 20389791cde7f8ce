"""The embeddings of a node agent: what engines put and find, and what moves between agents."""
