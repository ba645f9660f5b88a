"""The server: ten requests, start, hours of clients, upstream's own tests."""
