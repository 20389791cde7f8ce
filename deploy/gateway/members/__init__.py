"""Instances that join and leave the region's clusters."""
