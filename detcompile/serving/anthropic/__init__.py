"""Anthropic's requests and answers, as another form of chats."""
