"""The receiving side: connections, landings, and the rules across them."""
