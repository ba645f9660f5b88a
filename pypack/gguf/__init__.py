"""GGUF files: heads, tensors, shards. Knows nothing of packs."""
