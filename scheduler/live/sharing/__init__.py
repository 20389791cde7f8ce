"""Gateways of one region tell each other what they learn and have under way, and keep it."""
