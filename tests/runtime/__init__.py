"""Models at run time, in this process: so the package must be imported before llama_cpp."""

import llama_expert_pack  # noqa: F401
