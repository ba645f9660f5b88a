"""The one place that holds the version of this package, as written into every manifest."""

__version__ = "0.1.0"
