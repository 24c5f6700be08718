"""What users hold: compiled models of this process, of worker processes and of archives."""
