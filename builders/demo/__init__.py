"""The demo: scenes that we draw, a small model trained on them, and the command that shows it."""
