"""What a node agent sees of its links, and how it probes them."""
