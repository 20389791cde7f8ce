"""What runs regions for study: the link emulator and the demo."""
