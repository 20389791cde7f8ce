"""The connector's part in the prefix cache: look-ups, loads and stores."""
