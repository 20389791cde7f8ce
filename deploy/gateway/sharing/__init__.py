"""What a gateway keeps over a restart, and shares with the other gateways of its region."""
