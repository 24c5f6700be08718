"""vLLM's LLM class over compile() and an engine."""
