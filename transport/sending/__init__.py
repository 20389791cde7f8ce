"""The sending side: links, their connections, and who sends what next."""
