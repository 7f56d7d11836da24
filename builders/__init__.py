"""Offline: a checkpoint becomes a bundle. May import edgevlm; edgevlm never imports it."""
