"""Keeps what a gateway has learnt, over a restart and together with the region's other gateways."""
