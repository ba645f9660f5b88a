"""Synthetic mixture-of-experts GGUFs: real architectures and block layouts, random weights."""
