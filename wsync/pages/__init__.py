"""What people look at: small functions that make HTML and SVG of plain data.

A page needs nothing but itself: no network, no script.  It follows the reader's choice of light or
dark.  Everything is well-formed XML, and whatever is not markup is escaped.
"""
