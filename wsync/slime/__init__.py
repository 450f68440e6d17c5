"""slime: its updaters' interface, and the hook that has it use them.

--custom-megatron-init-path wsync.slime.install
"""

from wsync.slime.hook import install as install
