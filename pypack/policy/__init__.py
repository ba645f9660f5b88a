"""Which experts leave: one policy a file. Knows only the pool of slots that it rules."""
