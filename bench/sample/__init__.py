"""The trained sample: text, tokenizer, model, training and export of bench/data/sample-moe.gguf."""
