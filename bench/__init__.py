"""Synthetic models, comparison runs and plots."""
