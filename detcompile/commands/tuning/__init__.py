"""What `detcompile tune-speculation` measures and prints."""
