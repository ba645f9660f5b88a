"""The command expert-pack. Knows everybody, known by nobody."""
