"""From an HTTP request to one that is known, allowed and understood."""
