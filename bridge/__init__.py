"""Joins pypack and the patched llama.cpp."""

from bridge.llama import Llama

__all__ = ["Llama"]
