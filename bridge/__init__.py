"""Joins pypack and the patched llama.cpp: ``bridge.llama`` for Python, ``bridge.server`` for HTTP."""
