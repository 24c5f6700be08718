"""The command line, its commands, and the pages and tables that they write."""
