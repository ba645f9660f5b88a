"""The operating system: which files may be read or written, its errors, its memory. Knows the errors."""
