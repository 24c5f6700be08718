"""What `detcompile doctor` looks at on a machine, and what `detcompile diff` reads in files."""
