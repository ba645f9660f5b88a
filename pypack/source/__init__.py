"""Between a model and its pack: which tensors are experts, and whether a pack was made from this model."""
