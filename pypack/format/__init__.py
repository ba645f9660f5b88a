"""The pack format: layout, header, index, manifest. Knows nothing of GGUF files. docs/FORMAT.md is its specification."""
