"""Recorded lookups of experts: their format, reading, checks."""
