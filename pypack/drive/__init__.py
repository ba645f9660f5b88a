"""Reads blocks: O_DIRECT, retries, reasons."""
