"""Runs llama-server, stock or ours, with small local models."""
