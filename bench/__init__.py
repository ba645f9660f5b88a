"""Measures, against stock llama.cpp and against what the hardware gives. Imports no tests."""
