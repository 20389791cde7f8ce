"""The node agent: owns one host's KV memory and moves it for engines and the control plane."""
