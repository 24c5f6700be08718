"""Routes whose prompts and answers are token ids, in the forms of vLLM and SGLang."""
