"""How a block is spelled for one kind of executor."""
