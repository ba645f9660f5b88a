"""The drive: its raw rate, the native reading, conversion."""
