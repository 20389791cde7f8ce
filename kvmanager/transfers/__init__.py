"""The life of landings and outboxes, and the arena blocks they hold."""
