"""To be imported last by a process that others are forked from: what is there by then is not looked
at for garbage any more.

Modules that tests need are a million objects, which each full collection would walk through, and
whose pages each forked process would then copy.
"""

import gc

gc.freeze()
