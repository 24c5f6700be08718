"""The engine process, the front's end of it, and what they say to each other."""
