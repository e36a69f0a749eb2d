"""Kimi Delta Attention: a delta rule whose state decays per channel."""
