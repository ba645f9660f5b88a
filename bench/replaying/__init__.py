"""Replay of recorded expert lookups against cache policies."""
