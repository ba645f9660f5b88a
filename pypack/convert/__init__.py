"""Makes packs out of GGUFs, stops and goes on, verifies them."""
