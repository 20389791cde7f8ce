"""The life of one request at the gateway."""
