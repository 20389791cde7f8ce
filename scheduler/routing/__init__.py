"""Where one request is prefilled, and what decides it."""
