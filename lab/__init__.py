"""What tests and benchmarks both need: synthetic models, stock's libraries, logits of both."""
