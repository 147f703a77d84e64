"""The `tandem` command line: one small module per command."""
