"""Joins pypack and native: Llama, llama-server, the provider. Holds no policy and no format."""
