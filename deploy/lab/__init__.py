"""What runs regions for study: the link emulator, the demo and rehearsals."""
