"""The receiving side: connections, transfers, and the rules across them."""
