"""slime's updaters on top of wsync, and the hook that makes slime use them.

--custom-megatron-init-path wsync.slime.install
"""

from wsync.slime.hook import install as install
