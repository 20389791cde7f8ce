"""The long-term loop: plans for the traffic that is measured, and what they change."""
