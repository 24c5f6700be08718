"""Tool calls in the text of answers: formats, grammars and the reader."""
