"""An OpenAI-compatible server; its engines run in separate processes. Nothing here can change a bit of an answer."""
