"""What gateways of one region tell each other, and what one of them keeps over a restart."""
