"""What users write: sizes, counts, paths. Knows the errors."""
