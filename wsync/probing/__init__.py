"""Learns what a function does with tensors: it is given tensors whose values number their elements.

The function is called a load.  It takes pairs of a name and a tensor, and writes to other tensors.
An engine's load_weights is a load.  All modules use these words:

source  a tensor that a load is given
target  a tensor that a load may write to
digit   a number below a base, written as the value of an element.  One call of a load gives one
        digit of every element, and all digits together tell which element of which source it is
part    a block of a target that at most one source is loaded to
corner  the first element of a part
line    the elements of a target along one axis, through the corner of a part
slice   the elements of a target that have one index along an axis, and one along each axis before
place   a set of elements of a target
piece   a box of a source and its place in a target, or only a place that no source is copied to
"""
