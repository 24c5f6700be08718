"""OpenAI's requests and answers: their fields, their shapes, and what becomes of them."""
