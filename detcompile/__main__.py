"""python -m detcompile: the command line."""

from detcompile.commands.cli import main

if __name__ == "__main__":
    main()
