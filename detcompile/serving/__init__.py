"""An OpenAI-compatible server over an engine in a process of its own. Nothing here can change a bit of an answer."""
