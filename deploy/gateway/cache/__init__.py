"""What the region has cached: the gateway asks, shows and moves it."""
