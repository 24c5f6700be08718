"""OpenAI's API: requests, their translation to engine work, and replies."""
