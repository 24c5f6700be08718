"""What a proven graph is compiled to, and called as."""
