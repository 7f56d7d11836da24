"""What runs a bundle's graphs: one file per library, behind executors/base.py."""
