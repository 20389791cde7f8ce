"""Codecs of payloads, and which one makes a link faster."""
