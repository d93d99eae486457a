"""What each command of `echo2` does, one module per command, imported when it is called."""
