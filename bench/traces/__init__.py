"""The traces that docs/POLICY.md compares the cache policies on: how they are recorded or made up, and its tables."""
