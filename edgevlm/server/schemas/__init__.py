"""Request bodies, field for field. What is not here is refused; what is here is honoured.

A field that we know and cannot honour has only those values that mean "off"; docs/service.md
lists them.
"""
