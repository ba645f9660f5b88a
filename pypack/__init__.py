"""The decisions: what a pack holds, where each expert lies, and what leaves when another must come in. Calls no C."""
