"""One file per sub-command; `arguments` declares them all and imports nothing heavy."""
