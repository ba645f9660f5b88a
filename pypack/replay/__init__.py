"""Recorded lookups against cache policies: what a cache of any size and policy would have done."""
